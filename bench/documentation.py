"""The documentation that the embedded demo's questions are about: the docstrings of the standard library, as a text.

Paragraphs are unwrapped, as rendered documentation has them; names stand above what is said about them.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from specrun.train.corpus import SKIPPED_PACKAGES
from specrun.train.native_names import native_entries

__all__ = ["documentation"]

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documentation(without: Sequence[str] = ()) -> str:
    """Return all docstrings of this Python's standard library, those left out in which a text of `without` stands."""
    seen: set[str] = set()
    parts = []
    for name, doc in (*_of_files(), *((name, doc) for name, _, _, doc in native_entries())):
        text = _unwrapped(doc)
        if text and text not in seen and not any(one in text for one in without):
            seen.add(text)
            parts.append(f"{name}\n{text}\n")
    return "\n".join(parts)


def _of_files() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if any(part in SKIPPED_PACKAGES for part in parts):
            continue
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, _Documented) and (doc := ast.get_docstring(node)):
                yield getattr(node, "name", ".".join(parts)), doc


def _unwrapped(doc: str | None) -> str:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(doc or ""))
    return "\n".join(" ".join(one.split()) for one in paragraphs if one.strip())
