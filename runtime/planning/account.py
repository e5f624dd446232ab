"""The account of drafting against plain decoding: what was lost, and what may still be lost.

Time is counted in rounds of plain decoding, one a token. Drafting may lose some of them at first
(`start`), and a share of each token. So n tokens take at most

    n (1 + share) + start  rounds of plain decoding

if only rounds are drafted that fit what is left, and cost what they are expected to. What drafting
saved, up to `_SAVINGS` rounds, it may lose again.
"""

from __future__ import annotations

import math

START = 2.0
ASKING = 2.0
"""What a drafter that is asked and told takes of a round, over what it takes itself: the loop makes
requests and outcomes, and what comes after finds caches cold. Measured: 60 to 90 us in all beside
20 to 45 of the drafter's own, if an evaluation takes 0.25 ms."""
_SAVINGS = 8.0

# Of a drafter with a model: for each token, at first and at most, and at a text's beginning.
_LOST, _LOST_FIRST = 0.003, 3.0
LOST_ANEW = 1.0
_REST = 40  # tokens


class Account:
    """What may be lost: a share of the tokens, at most so much at a time, and what was saved.

    With `rest` a round may be lost again after so many tokens without any room, then after twice as
    many: nothing is learnt meanwhile, and the text may have become easy, but a small share of the
    tokens alone would take hundreds of them. Once drafting has saved more than it lost, rests are
    short again.
    """

    def __init__(
        self, share: float, most: float = math.inf, start: float = START, *, rest: int | None = None
    ) -> None:
        self._share, self._most = share, most
        self._spare, self._saved = min(start, most), 0.0
        self._first_rest, self._rest, self._waited = rest, rest, 0

    @property
    def room(self) -> float:
        """How many rounds may be lost now."""
        return self._spare + self._saved

    @property
    def saved(self) -> float:
        """How many of these were saved by drafting."""
        return self._saved

    def tokens_until(self, room: float) -> int:
        """Return how many tokens without a draft allow so much room."""
        return max(0, math.ceil((room - self.room) / self._share))

    def allow(self, tokens: int) -> None:
        """Count tokens, drafted or not: each allows a share of a round."""
        self._spare = min(self._most, self._spare + self._share * tokens)
        if self._rest is None:
            return
        self._waited = 0 if self.room > 0.0 else self._waited + tokens
        if self._waited >= self._rest:
            self._rest, self._waited = 2 * self._rest, 0
            self.grant(LOST_ANEW)

    def grant(self, rounds: float) -> None:
        """Let at least so many rounds be lost from now on: something new may pay."""
        self._spare = max(self._spare, min(rounds, self._most))

    def lose(self, rounds: float) -> None:
        """Count rounds that were lost to drafting or, below 0, saved by it."""
        self._saved = min(_SAVINGS, self._saved - rounds)
        if self._saved < 0.0:  # savings are lost first
            self._spare += self._saved
            self._saved = 0.0
        elif self._saved > 0.0:
            self._rest = self._first_rest


def account_of_model() -> Account:
    """Return the account of a drafter with a model, whose drafts are judged by calibrated chances.

    It may lose more at first than others, for those chances have to be learnt; what a text may lose
    anew (`LOST_ANEW`) is granted when it begins.
    """
    return Account(_LOST, _LOST_FIRST, _LOST_FIRST, rest=_REST)
