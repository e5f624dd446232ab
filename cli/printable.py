"""Text that is safe to show: model output and file metadata may carry terminal control codes."""

from __future__ import annotations

__all__ = ["one_line", "printable"]

# C0 and DEL and C1: escape sequences need one of them to begin. Line breaks and tabs are text.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text without control characters other than line breaks and tabs."""
    return text.translate(_CONTROLS)


def one_line(text: str, limit: int = 200) -> str:
    """Return the text as one line without control characters, cut to `limit` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
