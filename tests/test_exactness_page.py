"""docs/exactness-loop.md and docs/exactness-proof.md show the algorithm in our own code: each block
is the source, word for word.

`python tests/test_exactness_page.py` puts the sources into the pages; read the sentences between
them again then.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from support.mutated_source import source_of as file_of

from specrun.runtime.acceptance import decide, settle_point_masses, walk
from specrun.runtime.laws import Law
from specrun.runtime.round.loop import decode_rounds
from specrun.runtime.trees import tree_steps

DOCS = Path(__file__).resolve().parent.parent / "docs"
MOST_LINES = 100
Functions = tuple[Callable[..., object], ...]
QUOTED: dict[str, Functions] = {
    "exactness-loop.md": (decode_rounds, tree_steps),
    "exactness-proof.md": (walk, decide, settle_point_masses, Law.residual, Law.without),
}
"""The functions that each page quotes, in reading order."""

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def source_of(function: Callable[..., object]) -> str:
    """The function's text in its Python file, also if the function was compiled."""
    text = file_of(sys.modules[function.__module__]).read_text()
    found: ast.AST = ast.parse(text)
    for name in function.__qualname__.split("."):
        found = next(
            node for node in ast.iter_child_nodes(found) if getattr(node, "name", "") == name
        )
    assert isinstance(found, ast.FunctionDef)
    lines = text.splitlines(keepends=True)[found.lineno - 1 : found.end_lineno]
    return textwrap.dedent("".join(lines))


def differences(page: str, quoted: Functions) -> list[str]:
    """The faults of the page: blocks that are missing, too many, in another order, or not the
    source."""
    blocks = _BLOCK.findall(page)
    if len(blocks) != len(quoted):
        return [f"the page has {len(blocks)} blocks of code and should have {len(quoted)}"]
    pairs = zip(quoted, blocks, strict=True)
    return [
        f"{pair.__qualname__} is not what the page shows"
        for pair, block in pairs
        if block != source_of(pair)
    ]


def renewed(page: str, quoted: Functions) -> str:
    """The page with every block, in order, replaced by its source."""
    sources = iter(map(source_of, quoted))
    return _BLOCK.sub(lambda _block: f"```python\n{next(sources)}```", page)


@pytest.mark.parametrize("name", QUOTED)
def test_the_page_is_our_own_code(name: str) -> None:
    page = (DOCS / name).read_text()
    assert differences(page, QUOTED[name]) == [], (
        "python tests/test_exactness_page.py renews the blocks; then read the page again"
    )
    assert renewed(page, QUOTED[name]) == page


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name, quoted in QUOTED.items() for number in range(len(quoted))],
)
def test_a_block_that_is_missing_or_differs_is_seen(name: str, number: int) -> None:
    page, quoted = (DOCS / name).read_text(), QUOTED[name]
    block = _BLOCK.findall(page)[number]
    whole = f"```python\n{block}```\n"
    assert page.count(whole) == 1
    assert differences(page.replace(whole, ""), quoted)
    assert differences(page.replace(whole, whole.replace(" = ", " == ", 1)), quoted)
    assert differences(page.replace(whole, whole.replace("    ", "        ", 1)), quoted)
    assert differences(page.replace(whole, whole + whole), quoted)


@pytest.mark.parametrize("name", QUOTED)
def test_blocks_in_another_order_are_seen(name: str) -> None:
    page, quoted = (DOCS / name).read_text(), QUOTED[name]
    first, second = (f"```python\n{source_of(one)}```" for one in quoted[:2])
    swapped = page.replace(first, "?").replace(second, first).replace("?", second)
    assert len(differences(swapped, quoted)) >= 2


@pytest.mark.parametrize("name", QUOTED)
def test_sentences_lead_from_block_to_block(name: str) -> None:
    prose = _BLOCK.sub("```", (DOCS / name).read_text()).split("```")
    assert all(len(text.split()) > 8 for text in prose[:-1])


@pytest.mark.parametrize("name", QUOTED)
def test_the_code_of_a_page_is_short(name: str) -> None:
    blocks = _BLOCK.findall((DOCS / name).read_text())
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) < MOST_LINES
    assert max(map(len, lines)) <= 100


if __name__ == "__main__":
    for name, quoted in QUOTED.items():
        (DOCS / name).write_text(renewed((DOCS / name).read_text(), quoted))
