"""Which package a name is really used from: json.JSONDecoder is defined in json.decoder."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


def public_prefixes(module: str, path: Path, tree: ast.Module) -> dict[str, str]:
    """Map each name of `module` that its package's __init__ re-exports to the package's dotted name."""
    package, _, leaf = module.rpartition(".")
    init = path.parent / "__init__.py"
    if not package or path.name == "__init__.py" or not init.exists():
        return {}
    prefixes: dict[str, str] = {}
    for node in _parse(init).body:
        if isinstance(node, ast.ImportFrom) and _imports_from(node, package, leaf):
            for alias in node.names:
                names = _exported_names(tree) if alias.name == "*" else [alias.asname or alias.name]
                prefixes.update(dict.fromkeys(names, package))
    return prefixes


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def _imports_from(node: ast.ImportFrom, package: str, leaf: str) -> bool:
    relative = node.level == 1 and node.module == leaf
    return relative or (node.level == 0 and node.module == f"{package}.{leaf}")


def _exported_names(tree: ast.Module) -> list[str]:
    """The strings of a module's `__all__`; nothing when it has none or computes it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                return []
    return []
