"""Markdown as lines for a terminal: CommonMark with tables, and nothing of the text left out.

Rich draws it. Where its rules would hide what a model said, they are changed: HTML and images are
shown as they are written, addresses of links stand behind them, and every line break is kept.
"""

from __future__ import annotations

import io
import re
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_CODE_THEME = "ansi_dark"  # the terminal's own colours, on its own background


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
