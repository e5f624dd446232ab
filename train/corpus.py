"""The corpus of the embedded family: every public name of the standard library that has a docstring."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from specrun.train.docstrings import first_sentence
from specrun.train.native_names import native_entries
from specrun.train.reexports import public_prefixes

SKIPPED_PACKAGES = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
        "distutils",
        "lib-dynload",
        "pydoc_data",
    }
    | {"site-packages", "config", "__phello__", "this", "antigravity", "ntpath", "nturl2path", "genericpath"}
    | {"encodings", "tix", "pydoc", "expatbuilder", "ast"}
)
"""Not documentation anyone asks for: tests, retired packages, generated tables, jokes, the other os.path."""

_RENAMED = {"posixpath": "os.path"}
_MAX_SIGNATURE = 120


@dataclass(frozen=True, slots=True)
class Entry:
    """One public name: `kind` is "module", "class", "function" or "method"; `sentence` is what is learnt."""

    name: str
    kind: str
    signature: str | None
    sentence: str


def build_corpus() -> list[Entry]:
    """All entries, sorted by name, no name twice; the same for the same Python on the same platform."""
    found: dict[str, Entry] = {}
    for entry in _python_entries():
        found.setdefault(entry.name, entry)
    for name, kind, signature, doc in native_entries():
        sentence = first_sentence(doc)
        if sentence is not None:
            found.setdefault(name, Entry(name, kind, signature, sentence))
    return [found[name] for name in sorted(found)]


def write_corpus(entries: list[Entry], path: Path) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in entries), encoding="utf-8")


def read_corpus(path: Path) -> list[Entry]:
    """Read what `write_corpus` wrote."""
    return [Entry(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def sample_entries(entries: list[Entry], count: int, seed: int = 0) -> list[Entry]:
    """`count` entries, or all if there are fewer, in drawn order; the same for the same corpus and seed."""
    return random.Random(seed).sample(entries, min(count, len(entries)))


def _python_entries() -> Iterator[Entry]:
    """Entries of the library's .py files, read with `ast`: nothing is imported."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if not parts or any(part.startswith("_") or part in SKIPPED_PACKAGES for part in parts):
            continue
        module = ".".join(parts)
        yield from _module_entries(_RENAMED.get(module, module), path)


def _module_entries(module: str, path: Path) -> Iterator[Entry]:
    tree = ast.parse(path.read_bytes())
    yield from _entry(module, "module", tree)
    shown = public_prefixes(module, path, tree)
    for node in _definitions(tree.body):
        name = f"{shown.get(node.name, module)}.{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _entry(name, "class", node)
            for method in _definitions(node.body):
                if not isinstance(method, ast.ClassDef):
                    yield from _entry(f"{name}.{method.name}", "method", method)
        else:
            yield from _entry(name, "function", node)


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(body: list[ast.stmt]) -> Iterator[_Definition]:
    """Public classes and functions of a body, also those inside `if` and `try`."""
    for node in body:
        if isinstance(node, _Definition):
            if not node.name.startswith("_"):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body + node.orelse)


def _entry(name: str, kind: str, node: ast.Module | _Definition) -> Iterator[Entry]:
    sentence = first_sentence(ast.get_docstring(node))
    if sentence is None:
        return
    signature = None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        signature = _signature(node)
    yield Entry(name, kind, signature, sentence)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    text = f"{node.name}({ast.unparse(node.args)})"
    return text if len(text) <= _MAX_SIGNATURE else None
