"""The standard library's docstrings as a text, and a temporary datastore of them for REST.

The embedded demo's questions are about them. Paragraphs are unwrapped, as in rendered
documentation; the name of what is documented stands above its docstring.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from specrun.bench.drafters.corpus import SKIPPED_PACKAGES, native_entries
from specrun.bindings.models.model import Model
from specrun.runtime.demo import demo_questions
from specrun.runtime.drafters.retrieval import build_store

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


DocumentationKind = Literal["all", "disjoint"]


@contextmanager
def documentation_store(
    target: Path, kind: DocumentationKind, *, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Path]:
    """Yield a datastore for `target`'s vocabulary; "disjoint" leaves out what holds an answer."""
    lines = demo_questions().read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines] if kind == "disjoint" else []
    with tempfile.TemporaryDirectory(prefix="specrun-bench-") as folder:
        progress("reading the standard library's documentation")
        text = Path(folder) / "documentation.txt"
        text.write_text(documentation(answers), encoding="utf-8")
        store = Path(folder) / f"{kind}.store"
        progress("making a datastore of it")
        with Model(target, vocab_only=True) as model:
            build_store([text], model.vocabulary, store, model=target.name)
        yield store


def store_description(kind: DocumentationKind) -> str:
    """Return what a reader has to know about the store."""
    what = "rest retrieves from the docstrings of the standard library"
    if kind == "disjoint":
        return f"{what} without those that hold one of the answers (disjoint from the answers)"
    return f"{what}, which the questions are about: the store holds the answers"


def documentation(without: Sequence[str] = ()) -> str:
    """Return all docstrings of this Python's standard library that hold no text of `without`."""
    parts: dict[str, str] = {}
    for name, doc in (*_of_files(), *((name, doc) for name, _, _, doc in native_entries())):
        text = _unwrapped(doc)
        if text and not any(excluded in text for excluded in without):
            parts.setdefault(text, f"{name}\n{text}\n")
    return "\n".join(parts.values())


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
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())
