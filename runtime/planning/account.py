"""The account of drafting against plain decoding: the loss so far, and the rest of its bound.

There is one kind of account, for drafters that are named and for those that `auto` chooses from,
with a model or without. Time is counted in rounds of plain decoding, one a token. Drafting may
lose `START` of them at first, and `SHARE` of each token. So n tokens take at most

    n (1 + SHARE) + START + TRUST  rounds of plain decoding

if rounds take the expected time: .97 of plain decoding's speed over 200 tokens. A draft whose
drafter has no estimate of its acceptance must fit the rest of the bound, even if all of it is
rejected. One that is expected to gain may lose `TRUST` more: it is made while anything is left.
Drafting may lose its savings again, up to `_SAVINGS` rounds. `auto`, which tries several drafters,
has `SHARES_OF_AUTO` shares of each token.
"""

from __future__ import annotations

import math
from collections import deque

from specrun.runtime.planning.curves import STALL

START = 2.0
SHARE = 0.0125
SHARES_OF_AUTO = 2
TRUST = 1.0
_SAVINGS = 8.0
_ASKING = 2.0
"""The loop's time for a drafter in a round, beside the drafter's own: the loop makes
requests and outcomes, and the next steps find caches cold. Measured: 60 to 90 us in all beside
20 to 45 of the drafter's own, if an evaluation takes 0.25 ms."""
_LITTLE = 0.01  # of a plain round: a plan without a draft
_COLD = 3  # drafts that build graphs and read weights for the first time
_OWN = 9  # rounds that show the usual time of a proposal
_LONGEST = 256  # rounds without a proposal
_WAKES = 2  # proposals that must fit before a drafter makes one again


class Account:
    """The rounds that may be lost: a share of the tokens, and the savings of drafting."""

    def __init__(self, shares: int = 1) -> None:
        self.share = SHARE * shares
        self._spare, self._saved = START, 0.0
        self._own: deque[float] = deque(maxlen=_OWN)  # seconds of asking, lately
        self._asking = 0.0  # rounds of it

    @property
    def room(self) -> float:
        """How many rounds may be lost now."""
        return self._spare + self._saved

    def tokens_until(self, room: float) -> int:
        """Return how many tokens without a draft allow so much room."""
        return max(0, math.ceil((room - self.room) / self.share))

    def rest(self) -> int:
        """Return for how many tokens drafters must not propose, 0 while anything may be lost."""
        if self.room > 0.0:
            return 0
        # One pause that was taken for asking must not silence them for a whole text.
        return min(_LONGEST, self.tokens_until(min(_WAKES * self._asking, START)))

    def allow(self, tokens: int) -> None:
        """Count tokens, drafted or not: each allows a share of a round."""
        self._spare += self.share * tokens

    def lose(self, rounds: float) -> None:
        """Count rounds that were lost to drafting or, below 0, saved by it."""
        self._saved = min(_SAVINGS, self._saved - rounds)
        if self._saved < 0.0:  # savings are lost first
            self._spare += self._saved
            self._saved = 0.0

    def asking(self, seconds: float, plain: float) -> float:
        """Return the rounds lost to the drafters' own time in one; a plain one takes `plain`."""
        # The very first time everything is cold, which does not come again. Pauses of the machine
        # are cut. The median would not do: if every second round takes longer, each is usual.
        if self._own and plain > 0.0:
            self._asking = _ASKING * min(seconds, STALL * max(self._own)) / plain
        lost = self._asking if self._own else 0.0
        self._own.append(seconds)
        return lost

    def drafting(self, seconds: float, plain: float) -> float:
        """Return the same of a drafter with a plan.

        It observes the rounds in which it sleeps, too, so asking takes no more than that.
        """
        rounds = seconds / plain
        if rounds < _LITTLE:
            return rounds
        lost = 0.0
        if len(self._own) >= _COLD:  # pauses of the machine are cut
            lost = self._asking = min(rounds, STALL * max(self._own) / plain)
        self._own.append(seconds)
        return lost
