"""Markdown on a screen: what stands there at the end is the whole answer, however it came."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from specrun.cli.terminal.markdown import MarkdownLines, MarkdownWriter
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.round import TokenEvent

from ..conftest import Models, Run

_ANSWER = """# Steps

Take **two** of them, `f(x)` and
a [page](https://example.org/a), then <b>vector<int></b>:

1. first
2. second
   - below

   still the second

```python
def f(x):

    return x
```

| a | b |
| - | - |
| 1 | 2 |

> said
#1 is a line, no heading

---
The end ![a picture](b.png)"""


class Screen(Terminal):
    """What a terminal shows that knows line feeds, cursor up, and clearing to the end."""

    def __init__(self) -> None:
        super().__init__("on")
        self.lines = [""]
        self.row = self.column = 0

    def answer_drawn(self, text: str) -> None:
        for piece in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif piece.endswith("A"):
                self.row -= int(piece[2:-1])
                assert self.row >= 0
            elif piece.endswith("K"):
                self.lines[self.row] = self.lines[self.row][: self.column]
            elif piece.endswith("J"):
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            elif not piece.startswith("\x1b"):
                line = self.lines[self.row].ljust(self.column)
                after = line[self.column + len(piece) :]
                self.lines[self.row] = line[: self.column] + piece + after
                self.column += len(piece)

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines]


def _slow_clock() -> Iterator[float]:
    """A clock by which drawing takes no time, and a long time passes between any two tokens."""
    for moment in count():
        yield from (moment, moment)


def _whole(text: str) -> Any:
    return SimpleNamespace(text=text)


def _written(text: str, size: int, screen: Screen) -> list[str]:
    clock = _slow_clock()
    writer = MarkdownWriter(screen, lambda: next(clock))
    for start in range(0, len(text), size):
        writer.write(TokenEvent(text[start : start + size], 0, "target", 0, None))
    writer.finish(_whole(text))
    return screen.shown


def _plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in lines]


@pytest.fixture(autouse=True)
def _size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "41")
    monkeypatch.setenv("LINES", "50")


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
def test_the_same_whatever_pieces_it_comes_in(size: int) -> None:
    shown = _written(_ANSWER, size, Screen())
    assert _squeezed(shown) == _squeezed([*_plain(MarkdownLines(40).draw(_ANSWER)), ""])
    text = " ".join(shown)
    for said in ("Steps", "(https://example.org/a)", "<b>vector<int></b>", "a picture", "The end"):
        assert said in text
    assert "**" not in text


def test_a_screen_that_is_not_written_over_shows_it() -> None:
    """The control: where the cursor stays below, lines stand there twice."""

    class Appending(Screen):
        def answer_drawn(self, text: str) -> None:
            super().answer_drawn(re.sub(r"\x1b\[\d*A", "", text))

    whole = _squeezed([*_plain(MarkdownLines(40).draw(_ANSWER)), ""])
    assert _squeezed(_written(_ANSWER, 7, Appending())) != whole


def _squeezed(lines: list[str]) -> list[str]:
    """Return lines without second blank ones: blocks apart may have more between them."""
    return [line for index, line in enumerate(lines) if line or (index and lines[index - 1])]


@pytest.mark.parametrize("size", [1, 9])
def test_blocks_higher_than_the_screen_keep_every_line(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", "6")
    code = [f"line_{number} = {number}" for number in range(30)]
    text = "\n".join(["```python", *code, "```", "", "done"])
    assert _written(text, size, Screen()) == [*code, "", "done", ""]


def test_what_an_interruption_kept_back_is_shown() -> None:
    screen = Screen()
    writer = MarkdownWriter(screen)
    writer.write(TokenEvent("one **tw", 0, "target", 0, None))
    writer.finish(_whole("one **two**"))
    assert screen.shown == ["one two", ""]


def test_control_codes_of_a_model_are_harmless() -> None:
    shown = _written("a\x1b[2Jb\x07\x9bc `\x1b]0;title\x07`", 4, Screen())
    assert shown == ["a[2Jbc ]0;title", ""]


def test_line_breaks_stay() -> None:
    assert _written("Roses are red\nViolets are blue", 5, Screen()) == [
        "Roses are red",
        "Violets are blue",
        "",
    ]


def test_drawing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawing that takes long is followed by a pause ten times as long."""
    drawings: list[str] = []
    now = 0.0

    def draw(self: MarkdownLines, text: str) -> list[str]:
        nonlocal now
        now += 1.0
        drawings.append(text)
        return [text]

    monkeypatch.setattr(MarkdownLines, "draw", draw)
    writer = MarkdownWriter(Screen(), lambda: now)
    for _ in range(100):
        writer.write(TokenEvent("a", 0, "target", 0, None))
        now += 0.5
    assert 4 <= len(drawings) <= 100 * 0.5 / 10 + 1
    writer.finish(_whole("a" * 100))
    assert drawings[-1] == "a" * 100


def test_pipes_get_the_text_as_it_is(run: Run, models: Models) -> None:
    ended = run("chat", "-m", models.target, "-n", 4, "-s", 1, "--temp", 0, input="hello\n")
    plain = run(
        "chat", "-m", models.target, "-n", 4, "-s", 1, "--temp", 0, "--no-markdown", input="hello\n"
    )
    assert ended.stdout == plain.stdout
    assert "\x1b" not in ended.stdout
