"""Realignment after an edit: where a text that was being copied goes on in its source.

A text that repeats an earlier one with some tokens changed leaves it at every change, and the last
tokens are then found nowhere, or in many places. Copying goes on where it was left: behind the
source's next occurrence of the last token close by, or, where there is none, one token further, as
if one token had been replaced by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrun.runtime.drafters.retrieval.ngram_index import NgramIndex

FOUND_AGAIN = 3
"""Tokens of a match from which a place is found by them alone."""

_COPIED = 6  # tokens that must have been copied before an edit
_NEAR = 8  # tokens by which the source may be shorter or longer than what replaced it
_PATIENCE = 16  # tokens after which the source is given up


@dataclass(slots=True)
class Realignment:
    """Remembers which place of an index the text last copied from."""

    place: int = 0
    position: int = 0
    copied: int = 0

    def forget(self) -> None:
        """Copy from nowhere."""
        self.copied = 0

    def follow(self, place: int, match: int, position: int) -> None:
        """Note that the text's last `match` tokens before `position` stood before `place` too."""
        if match >= _COPIED:
            self.place, self.position, self.copied = place, position, match

    def resume(self, index: NgramIndex) -> tuple[int, int] | None:
        """Return where the source goes on and how many tokens match there; None without one."""
        tokens = index.tokens
        end = len(tokens)
        since = end - self.position
        if not self.copied or not 0 < since <= _PATIENCE:
            return None
        expected = self.place + since
        last = tokens[-1]
        first, beyond = max(1, expected - _NEAR), min(end, expected + _NEAR + 1)
        near = [place for place in range(first, beyond) if tokens[place - 1] == last]
        if near:
            matches = {place: index.match_before(place, FOUND_AGAIN) for place in near}
            best = min(near, key=lambda place: (-matches[place], abs(place - expected), place))
            return best, matches[best]
        # One token was replaced; after more of them there is no telling.
        return (expected, 0) if since == 1 and expected < end else None
