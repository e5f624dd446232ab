"""The account of drafting against plain decoding: what was lost, and what may still be lost.

Time is counted in rounds of plain decoding, one a token. Drafting may lose `START` of them at
first, and `SHARE` of each token. So n tokens take at most

    n (1 + SHARE) + START  rounds of plain decoding

where only rounds are drafted for that fit what is left, if they cost what they are expected to.
What drafting saved, up to `_SAVINGS` rounds, it may lose again.
"""

from __future__ import annotations

import math

START, SHARE = 1.5, 0.02
_SAVINGS = 8.0


class Account:
    """What may be lost: `most` of the tokens' share at a time, and besides what was saved."""

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._spare, self._saved = START, 0.0

    @property
    def room(self) -> float:
        """How many rounds may be lost now."""
        return self._spare + self._saved

    def allow(self, tokens: int) -> None:
        """Count tokens, drafted or not: each allows a share of a round."""
        self._spare = min(max(self._most, self._spare), self._spare + SHARE * tokens)

    def lose(self, rounds: float) -> None:
        """Count rounds that were lost to drafting or, below 0, saved by it."""
        self._saved = min(_SAVINGS, self._saved - rounds)
        if self._saved < 0.0:  # savings are lost first
            self._spare += self._saved
            self._saved = 0.0
