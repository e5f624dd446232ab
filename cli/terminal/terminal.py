"""Terminal output: answers to stdout, everything else to stderr, coloured where that helps.

Model output and file metadata may carry terminal control codes, which are taken out.
"""

from __future__ import annotations

import os
import sys
from typing import Literal, TextIO

# C0 and DEL and C1: escape sequences need one of them to begin. Line breaks and tabs are text.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text without control characters other than line breaks and tabs."""
    return text.translate(_CONTROLS)


def one_line(text: str, limit: int = 200) -> str:
    """Return the text as one line without control characters, cut to `limit` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


ColorChoice = Literal["on", "off", "auto"]
Style = Literal["plain", "dim", "bold", "cyan", "green", "yellow", "red"]
_CODES: dict[Style, str] = {
    "plain": "",
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "red": "\x1b[31m",
    "green": "\x1b[32m",
    "yellow": "\x1b[33m",
    "cyan": "\x1b[36m",
}
_RESET = "\x1b[0m"


class Terminal:
    """The two output streams of a command.

    `color` "auto" colours terminals only, unless NO_COLOR or FORCE_COLOR says otherwise. `quiet`
    leaves out notes (banner, statistics), never answers, warnings or errors.
    """

    def __init__(
        self, color: ColorChoice = "auto", *, quiet: bool = False, verbosity: int = 0
    ) -> None:
        self.quiet = quiet
        self.verbosity = verbosity
        self.answers_on_screen = sys.stdout.isatty()
        self.notes_on_screen = sys.stderr.isatty()
        self.color_answers = _wants_color(color, self.answers_on_screen)
        self.color_notes = _wants_color(color, self.notes_on_screen)

    # -- stdout ------------------------------------------------------------------------------------

    def answer(self, text: str, style: Style = "plain") -> None:
        """Write model text or JSON to stdout at once: raw into a pipe, harmless on a screen."""
        if self.answers_on_screen:
            text = printable(text)
        if text:
            _write(sys.stdout, self._styled(text, style, self.color_answers))

    def answer_drawn(self, text: str) -> None:
        """Write text with escape sequences of our own to stdout; what a model said is harmless."""
        if text:
            _write(sys.stdout, text)

    # -- stderr ------------------------------------------------------------------------------------

    def say(self, text: str, style: Style = "plain") -> None:
        """Write a line to stderr that the user asked for."""
        _write(sys.stderr, self._styled(printable(text), style, self.color_notes) + "\n")

    def note(self, text: str, style: Style = "dim") -> None:
        """Write a line to stderr that `quiet` leaves out."""
        if not self.quiet:
            self.say(text, style)

    def warn(self, text: str) -> None:
        """Write a warning to stderr."""
        self.say(f"Warning: {text}", "yellow")

    def error(self, text: str) -> None:
        """Write an error to stderr, after which the command goes on."""
        self.say(f"Error: {text}", "red")

    def passing(self, text: str) -> None:
        """Show a line that the next passing line replaces; "" takes it away. Screens only."""
        if self.notes_on_screen and not self.quiet:
            _write(sys.stderr, "\r\x1b[K" + self._styled(printable(text), "dim", self.color_notes))

    def _styled(self, text: str, style: Style, color: bool) -> str:
        return f"{_CODES[style]}{text}{_RESET}" if color and _CODES[style] else text


def _wants_color(color: ColorChoice, on_screen: bool) -> bool:
    if color != "auto":
        return color == "on"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return on_screen and os.environ.get("TERM") != "dumb"


def _write(stream: TextIO, text: str) -> None:
    if stream is sys.stderr:
        sys.stdout.flush()  # so that both appear in the order they were written
    stream.write(text)
    stream.flush()
