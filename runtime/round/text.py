"""Tokens to text as they arrive: split characters (UTF-8), split stop strings; common parts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_LONG = 64  # tokens, of which it pays to compare copies


class TextAssembler:
    """Turns bytes into text that can be shown, without parts that may become a stop string.

    Bytes of an unfinished character wait for the rest; text that could be the beginning of a stop
    string waits until it is one or not. Nothing of a stop string is ever released.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        # Together, because they change together: bytes of a character that is not whole, text that
        # may become a stop string, and the stop string that came.
        self._state: tuple[bytes, str, str | None] = (b"", "", None)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that became complete, None while none has."""
        return self._state[2]

    def push(self, piece: bytes, *, final: bool = False) -> str:
        """Return the text that is certain with `piece`; a complete stop string is `stopped_by`.

        Nothing comes after a `final` piece: an unfinished character is replaced.
        """
        unfinished, held, stopped_by = self._state
        if not unfinished and not self._stop and piece.isascii():
            return piece.decode()  # nothing was held back and nothing is, as nearly always
        # Models may write bytes that are no UTF-8: they are shown as replacements, not raised.
        data = unfinished + piece
        text, n_read = codecs.utf_8_decode(data, "replace", final)
        if self._stop:
            text, held, stopped_by = self._cut(text, held, stopped_by)
        self._state = (data[n_read:], held, stopped_by)
        return text

    def push_all(self, pieces: Sequence[bytes]) -> tuple[str, int]:
        """Return the text that is certain with these pieces, and how many of them it took.

        None are taken after one that completes a stop string.
        """
        before = self._state
        text = self.push(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._state[2] is None:
            return text, len(pieces)
        # The text does not depend on how it is split; which piece ended it is seen one by one.
        self._state = before
        for count, piece in enumerate(pieces, 1):
            self.push(piece)
            if self._state[2] is not None:
                return text, count
        raise AssertionError("a stop string came with all pieces and with none of them")

    def finish(self) -> str:
        """Return the text held back; an unfinished character becomes the replacement character."""
        text = self.push(b"", final=True)
        # The beginning of a stop string that did not end is text.
        unfinished, held, stopped_by = self._state
        self._state = (unfinished, "", stopped_by)
        return text if stopped_by is not None else text + held

    def _cut(self, text: str, held: str, stopped_by: str | None) -> tuple[str, str, str | None]:
        """Return the certain text, the text that is held back, and the stop string that ends it."""
        if stopped_by is not None:
            return "", "", stopped_by
        text = held + text
        places = ((text.find(stop), stop) for stop in self._stop)
        found = [(index + len(stop), index, stop) for index, stop in places if index >= 0]
        if found:
            # The one that is complete first: the answer must not depend on how the text was split.
            _, index, stop = min(found)
            return text[:index], "", stop
        certain = len(text) - self._possible_stop(text)
        return text[:certain], text[certain:], None

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        # A whole stop string would have been found: only a part of one can be at the end.
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stop if len(stop) > length)):
                return length
        return 0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens `a` and `b` share."""
    limit = min(len(a), len(b))
    if limit > _LONG and list(a[:limit]) == list(b[:limit]):  # the usual case, at the speed of C
        return limit
    for place, (mine, theirs) in enumerate(zip(a, b, strict=False)):
        if mine != theirs:
            return place
    return limit
