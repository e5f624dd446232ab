"""What members promise of a round, and how far that held: choices that need no probes.

Drafters that read the text alone foresee what their proposal is worth in this very round: from how
often what they would have proposed was what came. That is learnt in every round, whoever drafts,
because a point mass would have been accepted exactly where it is the token that came. So they are
never tried out: one is asked in the rounds for which it promises more than the drafter in use
yields, and costs nothing in all others. (A model's acceptance is not known without drafting.)

A promise stands on a cost curve that may not be this machine's, and on estimates. Every round that
was drafted on one tells what it was worth, and the next ones are believed as far as the last held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.runtime.drafter import Drafter, DraftRequest

_MARGIN = 1.1  # times what is in use: promises are no measurements, and a change costs a little
_PRIOR = 4.0  # tokens that the belief in a promise weighs as much as, before any was kept
_MEMORY = 0.95  # of a round that kept a promise, after the next one
_FORGIVEN = 0.995  # of what is held against a member, after a round in which it was not asked
_DISTURBED = 2.0  # times what was promised, from which something else took a round's time


@dataclass(slots=True)
class _Trust:
    """Tokens that came in rounds drafted on promises, and those promised in their time."""

    came: float = 0.0
    promised: float = 0.0

    @property
    def kept(self) -> float:
        """The share of promises that was kept."""
        return (self.came + _PRIOR) / (self.promised + _PRIOR)

    def fade(self, share: float) -> None:
        """Let what was seen weigh less."""
        self.came *= share
        self.promised *= share


class Promises:
    """Asks the members that foresee what a round yields; believes them as far as they kept it."""

    def __init__(self, members: Sequence[Drafter]) -> None:
        self._members = {place: each for place, each in enumerate(members) if each.foresees}
        self._trust = {place: _Trust() for place in self._members}
        self._taken: tuple[int, float] | None = None

    @property
    def places(self) -> frozenset[int]:
        """The members that foresee."""
        return frozenset(self._members)

    def better_than(self, speed_up: float, request: DraftRequest) -> int | None:
        """Return the member that promises most, if that is more than this over plain decoding."""
        self._taken = None
        best, most = None, _MARGIN * speed_up
        for place, member in self._members.items():
            promised = member.forecast(request)
            trust = self._trust[place]
            trust.fade(_FORGIVEN)
            if promised * trust.kept > most:
                best, most = place, promised * trust.kept
                self._taken = place, promised
        return best

    def settle(self, tokens: int, plain_rounds: float) -> None:
        """Compare the round that was drafted on a promise with what it yielded in its time."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        place, promised = taken
        trust = self._trust[place]
        trust.fade(_MEMORY)
        trust.came += tokens
        trust.promised += min(promised * plain_rounds, _DISTURBED * max(promised, float(tokens)))
