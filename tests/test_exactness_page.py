"""docs/exactness-proof.md shows the algorithm in our own code: each block is the source, word for
word.

`python tests/test_exactness_page.py` puts the sources into the page; read the sentences between
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

PAGE = Path(__file__).resolve().parent.parent / "docs" / "exactness-proof.md"
HEADING = "## The whole algorithm on one page\n"
MOST_LINES = 170
QUOTED: tuple[Callable[..., object], ...] = (
    decode_rounds,
    tree_steps,
    walk,
    decide,
    settle_point_masses,
    Law.residual,
    Law.without,
)
"""What the page quotes, in reading order."""

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


def section_of(page: str) -> str:
    """The section's text, from below its heading to the next one."""
    assert page.count(HEADING) == 1
    return page.partition(HEADING)[2].partition("\n## ")[0]


def differences(page: str) -> list[str]:
    """What is wrong with the page: blocks that are missing, too many, in another order, or not the
    source."""
    blocks = _BLOCK.findall(section_of(page))
    if len(blocks) != len(QUOTED):
        return [f"the page has {len(blocks)} blocks of code and should have {len(QUOTED)}"]
    pairs = zip(QUOTED, blocks, strict=True)
    return [
        f"{pair.__qualname__} is not what the page shows"
        for pair, block in pairs
        if block != source_of(pair)
    ]


def renewed(page: str) -> str:
    """The page with every block, in order, replaced by its source."""
    section, sources = section_of(page), iter(map(source_of, QUOTED))
    return page.replace(
        section, _BLOCK.sub(lambda _block: f"```python\n{next(sources)}```", section)
    )


@pytest.fixture
def page() -> str:
    return PAGE.read_text()


def test_the_page_is_our_own_code(page: str) -> None:
    assert differences(page) == [], (
        "python tests/test_exactness_page.py renews the blocks; then read the page again"
    )
    assert renewed(page) == page


@pytest.mark.parametrize("number", range(len(QUOTED)))
def test_a_block_that_is_missing_or_differs_is_seen(page: str, number: int) -> None:
    block = _BLOCK.findall(section_of(page))[number]
    whole = f"```python\n{block}```\n"
    assert page.count(whole) == 1
    assert differences(page.replace(whole, ""))
    assert differences(page.replace(whole, whole.replace(" = ", " == ", 1)))
    assert differences(page.replace(whole, whole.replace("    ", "        ", 1)))
    assert differences(page.replace(whole, whole + whole))


def test_blocks_in_another_order_are_seen(page: str) -> None:
    first, second = (f"```python\n{source_of(one)}```" for one in QUOTED[:2])
    assert (
        len(differences(page.replace(first, "?").replace(second, first).replace("?", second))) >= 2
    )


def test_sentences_lead_from_block_to_block(page: str) -> None:
    prose = _BLOCK.sub("```", section_of(page)).split("```")
    assert all(len(text.split()) > 8 for text in prose[:-1])


def test_it_is_one_page(page: str) -> None:
    lines = [line for block in _BLOCK.findall(section_of(page)) for line in block.splitlines()]
    assert len(lines) < MOST_LINES
    assert max(map(len, lines)) <= 100


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
