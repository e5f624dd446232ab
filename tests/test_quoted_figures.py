"""Figures of speed in README and the pages: each is quoted from docs/benchmarks.md, or is listed.

A figure is a speed-up (2.93x), tokens a second or tokens a round, in prose or in a table's column
of that name. Its section has to link to the section of benchmarks.md that it is quoted from, which
has the machine and the command. docs/measurements.md is a dated log and is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXEMPT = {"benchmarks.md", "measurements.md", "options.md"}
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}

NOT_MEASURED = {
    ("accelerate.md", "1.02"): "the least tokens a round of a drafter that is chosen",
    ("exactness.md", "0.3"): "tokens that are evaluated again, not what a round yields",
}
"""Numbers that look like figures and are none, each with its reason."""

NUMBER = r"\d*\.?\d+(?:,\d{3})*"
UNIT = r"(?:tok/s|tokens (?:a|per) (?:round|second))"
SPEED_UP = re.compile(rf"(?<![\w.=+-])({NUMBER})x(?!\w)")
IN_PROSE = re.compile(rf"(?<![\w.=])({NUMBER})(?:(?:,| to| and) {NUMBER})* {UNIT}")
COLUMN = re.compile(rf"speed-up|over exact|{UNIT}")
LINK = re.compile(r"benchmarks\.md(#[\w-]+)?\)")


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the anchor and the text of each section, its heading included."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        heading = part.partition("\n")[0].lstrip("# ").lower()
        yield re.sub(r"[^\w -]", "", heading).replace(" ", "-"), part


def figures(text: str) -> set[tuple[str, str]]:
    """Return the figures of a section: each as (number, "x" or "")."""
    found = {(number, "x") for number in SPEED_UP.findall(text)}
    found |= {(number, "") for number in IN_PROSE.findall(text)}
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
        whole = COLUMN.search(head[0]) is not None
        for row in rows:
            for name, cell in zip(head, row, strict=True):
                if cell is not row[0] and (whole or COLUMN.search(name)):
                    bare = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)|\bn=\d+", "", cell)
                    found |= {
                        (number, "") for number in re.findall(rf"(?<![\w.])({NUMBER})(?!\w)", bare)
                    }
    return {(_plain(number), unit) for number, unit in found}


def numbers(text: str, unit: str) -> set[str]:
    """Return all numbers of a text, or those with an "x" behind them."""
    return {_plain(number) for number in re.findall(rf"(?<![\w.])({NUMBER}){unit}(?!\w)", text)}


def _plain(number: str) -> str:
    return f"0{number}" if number.startswith(".") else number


def unquoted(page: str, text: str, source: dict[str, str]) -> list[str]:
    """Return the figures of a page that the sections it links to do not have."""
    found = []
    for anchor, section in sections(text):
        links = LINK.findall(section)
        linked = " ".join(source[link[1:]] if link else " ".join(source.values()) for link in links)
        for number, unit in sorted(figures(section)):
            if number in numbers(linked, unit) or (page, number) in NOT_MEASURED:
                continue
            found.append(f"{page}#{anchor}: {number}{unit}")
    return found


def benchmarks() -> dict[str, str]:
    """Return the sections of docs/benchmarks.md, each with those below it, by anchor."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    parts = list(sections(text))
    found = {}
    for index, (anchor, part) in enumerate(parts):
        level = len(part) - len(part.lstrip("#"))
        below = []
        for _, later in parts[index + 1 :]:
            if len(later) - len(later.lstrip("#")) <= level:
                break
            below.append(later)
        found[anchor] = "".join([part, *below])
    return found


@pytest.mark.parametrize("page", [name for name in PAGES if name not in EXEMPT])
def test_figures_are_quoted(page: str) -> None:
    assert unquoted(page, PAGES[page].read_text(encoding="utf-8"), benchmarks()) == []


def test_a_figure_that_is_not_quoted_is_found() -> None:
    source = {"a-pair": "## A pair\n| speed-up |\n|---|\n| 2.93x | 26.4 |\n", "other": "## Other\n"}
    linked = "[here](benchmarks.md#a-pair)"
    assert unquoted("p.md", f"# P\n2.93x and 26.4 tok/s: {linked}\n", source) == []
    assert unquoted("p.md", f"# P\n2.94x: {linked}\n", source) == ["p.md#p: 2.94x"]
    assert unquoted("p.md", "# P\n2.93x, without a link\n", source) == ["p.md#p: 2.93x"]
    assert unquoted("p.md", "# P\n2.93x [x](benchmarks.md#other)\n", source) == ["p.md#p: 2.93x"]
    table = f"# P\n{linked}\n\n| text | tokens a round |\n|---|---|\n| 12 | 4.5 |\n"
    assert unquoted("p.md", table, source) == ["p.md#p: 4.5"]
    assert unquoted("p.md", "# P\n`tree=4x2x2` and 5,000 tokens, 1.5 tokens a round\n", source) == [
        "p.md#p: 1.5"
    ]
