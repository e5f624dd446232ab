"""Markdown on a terminal while it comes: finished blocks stay, the last one is drawn again.

Rich draws it. Rules that would hide parts of a model's text are changed: HTML and images are shown
as they are written, addresses of links stand behind them, and every line break is kept.
"""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Callable
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax

from specrun.cli.terminal.terminal import Terminal, printable
from specrun.runtime.round import GenerationResult, TokenEvent

_LEAST_PAUSE_S = 0.05
_PAUSES_PER_DRAWING = 10  # at most a tenth of the time goes into drawing
_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_CODE_THEME = "ansi_dark"  # the terminal's own colours, on its own background


class MarkdownWriter:
    """Writes the text of token events as Markdown, on a screen of cells that can be written again.

    A block (a paragraph, a list, code) is drawn anew as it grows, and left alone when the next one
    begins. Of one that is higher than the screen, the lines above it are left alone before: lines
    that have scrolled away cannot be changed.
    """

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._clock = terminal, clock
        size = shutil.get_terminal_size()
        # A full last column would leave the cursor in doubt.
        self._lines = MarkdownLines(max(20, size.columns - 1))
        self._most_live = max(2, size.lines - 2)
        self._taken = 0  # characters of the answer
        self._block = ""  # the last block so far, and maybe the begin of the next
        self._kept = 0  # drawn lines of it that are left alone
        self._live = 0  # drawn lines of it that are on the screen below those
        self._separate = False  # whether a blank line is due before it
        self._next_drawing = 0.0

    def write(self, event: TokenEvent) -> None:
        """Take the text that became certain with a token; draw it, unless that was just done."""
        if not event.text:
            return
        self._taken += len(event.text)
        self._block += printable(event.text)
        began = self._clock()
        if began < self._next_drawing:
            return
        self._draw(whole=False)
        ended = self._clock()
        self._next_drawing = ended + max(_LEAST_PAUSE_S, _PAUSES_PER_DRAWING * (ended - began))

    def finish(self, result: GenerationResult) -> None:
        """Draw the rest of a whole result after an interruption, and end the line."""
        self._block += printable(result.text[self._taken :])
        self._draw(whole=True)
        self._block = ""

    def _draw(self, *, whole: bool) -> None:
        """Draw the blocks that have ended, and the beginning of the last one."""
        lines: list[str] = []
        n_lines = self._lines.first_block(self._block)
        while n_lines:
            source = self._block.split("\n")
            self._block = "\n".join(source[n_lines:])
            self._end_block(lines, "\n".join(source[:n_lines]))
            n_lines = self._lines.first_block(self._block)
        if whole:
            self._end_block(lines, self._block)
            self._separate, n_live = False, 0
        else:
            last = self._drawn(self._block)[self._kept :]
            lines.extend(last)
            n_live = min(len(last), self._most_live)
            self._kept += len(last) - n_live
        self._replace_live(lines, n_live)

    def _replace_live(self, lines: list[str], n_live: int) -> None:
        """Write lines over the live ones; the last `n_live` are those from now on.

        The cursor stays behind the last of them, or below all if none is live. Lines are cleared
        one by one: some terminals keep a copy of a screen that is cleared at once.
        """
        up = f"\x1b[{self._live - 1}A" if self._live > 1 else ""
        text = "\n".join(f"{line}\x1b[K" for line in lines)
        if lines and not n_live:
            text += "\n"
        if lines or self._live:
            self._terminal.answer_drawn(f"\r{up}{text}\x1b[J")
        self._live = n_live

    def _end_block(self, lines: list[str], block: str) -> None:
        drawn = self._drawn(block)
        lines.extend(drawn[self._kept :])
        self._separate = self._separate or bool(drawn)
        self._kept = 0

    def _drawn(self, block: str) -> list[str]:
        """Return the lines of a block, the blank one before it among them."""
        lines = self._lines.draw(block) if block.strip() else []
        return ["", *lines] if lines and self._separate else lines


class MarkdownLines:
    """Draws Markdown in lines of at most `width` columns."""

    def __init__(self, width: int) -> None:
        self._parser = MarkdownIt("commonmark", {"html": False}).disable("image")
        self._parser.enable(["strikethrough", "table"])
        self._screen = io.StringIO()
        self._console = Console(
            file=self._screen, force_terminal=True, width=width, highlight=False
        )

    def first_block(self, text: str) -> int:
        """Return how many lines of a text belong to its first block; 0 if no other has begun.

        The last line counts when it has ended: "#" begins a block, "#1" does not.
        """
        ended = text[: text.rfind("\n") + 1]
        starts = [
            token.map[0] for token in self._parser.parse(ended) if token.map and not token.level
        ]
        return starts[1] if len(starts) > 1 else 0

    def draw(self, text: str) -> list[str]:
        """Return a text's lines as drawn, with escape sequences, without blank ones around."""
        self._console.print(_Drawn(self._parser.parse(text)), end="")
        lines = self._screen.getvalue().split("\n")
        self._screen.seek(0)
        self._screen.truncate()
        said = [index for index, line in enumerate(lines) if _STYLES.sub("", line).strip()]
        return [line.rstrip(" ") for line in lines[said[0] : said[-1] + 1]] if said else []


class _PlainHeading(Heading):
    """Headings as Rich draws them, none of them centred."""

    LEVEL_ALIGN = {}  # noqa: RUF012 - Rich's own name for it


class _PlainCode(CodeBlock):
    """Code from the first column on, to be copied, without a background."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(
            code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default"
        )


class _Drawn(Markdown):
    """A text that was parsed by other rules than Rich's own."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _PlainHeading,
        "fence": _PlainCode,
        "code_block": _PlainCode,
    }

    def __init__(self, parsed: list[Token]) -> None:
        super().__init__("", code_theme=_CODE_THEME, hyperlinks=False)
        for token in parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"
        self.parsed = parsed
