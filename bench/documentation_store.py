"""A temporary datastore of the documentation that the embedded demo's questions are about."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from specrun.bench.documentation import documentation
from specrun.bindings.model import Model
from specrun.runtime.datastore.build_store import build_store
from specrun.runtime.demo import demo_questions

__all__ = ["DocumentationKind", "documentation_store", "store_description"]

DocumentationKind = Literal["all", "disjoint"]


@contextmanager
def documentation_store(
    target: Path, kind: DocumentationKind, *, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Path]:
    """Yield a datastore for `target`'s vocabulary; "disjoint" leaves out whatever holds one of the answers."""
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
