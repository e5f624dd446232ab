"""The elements of a JSON array in a file, one at a time: neither the file nor its values are in memory whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

__all__ = ["array_elements", "begins_array_of_objects"]

_PIECE = 1 << 18  # characters
_SPACE = re.compile(r"[ \t\r\n]*")
_BEGINNING = re.compile(r'\s*\[\s*\{\s*["}]')


def begins_array_of_objects(text: str) -> bool:
    """Return whether a file that begins so is an array of objects; `[1] Introduction` begins a text."""
    return _BEGINNING.match(text) is not None


def array_elements(start: str, rest: TextIO) -> Iterator[Any]:
    """Yield the values of an array, of at least one, whose text is `start` and then what `rest` has to read.

    Raises ValueError where the text is no array, naming the element by its number from 1.
    """
    window = _Window(start, rest)
    number, follows = 0, window.next_character()
    while follows in ("[", ","):
        window.take()
        number += 1
        yield window.value(f"element {number}")
        follows = window.next_character()
    if follows != "]":
        raise ValueError(f"after element {number} comes {follows!r}" if follows else f"it ends after element {number}")
    window.take()
    if window.next_character():
        raise ValueError(f"more follows its end, which is after element {number}")


class _Window:
    """What has been read of a file, from the place that is parsed next."""

    def __init__(self, start: str, rest: TextIO) -> None:
        self._text, self._at, self._rest = start, 0, rest
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """Go on to the next character that is no space, and return it; empty at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None  # it matches nothing, too
            self._at = found.end()
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def take(self) -> None:
        """Go past a character."""
        self._at += 1

    def value(self, name: str) -> Any:  # noqa: ANN401 - any JSON value
        """Return the value that comes next, and go past it; raises ValueError with its `name`."""
        self.next_character()
        while True:
            try:
                found, self._at = self._decoder.raw_decode(self._text, self._at)
                return found
            except json.JSONDecodeError as error:
                if not self._grow():  # there may have been more of it
                    raise ValueError(f"{name} is not JSON ({error.msg})") from error
            except RecursionError as error:
                raise ValueError(f"{name} is nested too deeply") from error

    def _grow(self) -> bool:
        """Read on, as much as there is and more, so that a long value is not parsed often; False at the end."""
        left = self._text[self._at :]
        piece = self._rest.read(max(_PIECE, len(left)))
        self._text, self._at = left + piece, 0
        return bool(piece)
