"""Faces of packages whose names are imported when they are first used.

A face lists its names once, for readers and type checkers alike:

    if TYPE_CHECKING:
        from specrun.runtime.engine.runtime import Runtime
    __getattr__, __dir__ = lazy_face(__name__)

`import specrun.runtime` then costs a millisecond, and a user of one module of the package does not
wait for the others. The names are read from the package's own source.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable


def lazy_face(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, for the names below `if TYPE_CHECKING`."""

    @functools.cache
    def homes() -> dict[str, tuple[str, str]]:
        return _homes(package)

    def get(name: str) -> object:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        module, original = homes()[name]
        found: object = getattr(importlib.import_module(module), original)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes()})

    return get, names


def _homes(package: str) -> dict[str, tuple[str, str]]:
    """Return the module, and the name there, of each name of a face."""
    spec = importlib.util.find_spec(package)
    source = None if spec is None else spec.loader.get_source(package)  # type: ignore[union-attr]
    if source is None:
        raise ImportError(f"the source of {package} is not installed: its names are read from it")
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
