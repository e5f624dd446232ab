"""Tokens to text as they arrive: split characters (UTF-8) and split stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextAssembler:
    """Turns bytes into text that can be shown, holding back what a stop string may still claim.

    Bytes of an unfinished character wait for the rest; text that could be the beginning of a stop
    string waits until it is one or not. Nothing of a stop string is ever released.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        # Models may say bytes that are no UTF-8: they are shown as replacements, not raised.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, piece: bytes) -> str:
        """Return the text that is certain with `piece`; a complete stop string is `stopped_by`."""
        return self._release(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return the text held back; an unfinished character becomes the replacement character."""
        text = self._release(self._decoder.decode(b"", final=True))
        # What could have begun a stop string and did not is text.
        rest, self._held = self._held, ""
        return text if self.stopped_by is not None else text + rest

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        places = ((text.find(stop), stop) for stop in self._stop)
        found = [(index + len(stop), index, stop) for index, stop in places if index >= 0]
        if found:
            # The one that is complete first: the answer must not depend on how the text was split.
            _, index, self.stopped_by = min(found)
            self._held = ""
            return text[:index]
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        # A whole stop string would have been found: only a part of one can be at the end.
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stop if len(stop) > length)):
                return length
        return 0
