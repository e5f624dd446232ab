"""How often a pool of n-grams is right, by how much of the context matched: counted on the text, drafted or not.

A guess that is a point mass is accepted exactly if it is the token that comes. So every committed token tells for all
that the pool would have guessed whether it would have been accepted, without evaluating it: estimates cost nothing
and depend on tokens alone, never on time. A text is short and classes are many, so all share one more number: how much
better or worse guesses have been lately than their classes say, in log-odds; it notices within some tokens that a text
has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.runtime.planning.recent_odds import RecentOdds

__all__ = ["MatchAcceptance"]

# First estimates: by the number of matched tokens, and what is left of them for the second, third, ... continuation.
_BY_MATCH = (0.1, 0.25, 0.35, 0.4, 0.45, 0.65, 0.8)
_BY_RANK = (1.0, 0.3, 0.15, 0.1)
_WEIGHT = 4.0  # how many observations the first estimate counts for
_MEMORY = 48.0  # observations after which older ones begin to fade


class MatchAcceptance:
    """The share of accepted tokens by matched length (those above the last class count to it) and rank."""

    ranks = len(_BY_RANK)

    def __init__(self) -> None:
        self._hits = [[_WEIGHT * match * rank for rank in _BY_RANK] for match in _BY_MATCH]
        self._trials = [[_WEIGHT] * len(_BY_RANK) for _ in _BY_MATCH]
        self._lately = RecentOdds()

    def probability(self, matched: int, rank: int) -> float:
        """Return the estimate for a continuation of this rank after so many matched tokens (1 or more)."""
        row = min(matched, len(_BY_MATCH)) - 1
        return self._lately.applied(self._hits[row][rank] / self._trials[row][rank])

    def count(self, continuations: Sequence[tuple[int, int]], token: int) -> None:
        """Count which of the continuations (token, matched length), by rank, the next token was."""
        if continuations:
            guess, matched = continuations[0]
            self._lately.observe(self.probability(matched, 0), guess == token)
        for rank, (guess, matched) in enumerate(continuations[: self.ranks]):
            row = min(matched, len(_BY_MATCH)) - 1
            if self._trials[row][rank] >= _MEMORY:
                self._hits[row][rank] /= 2.0
                self._trials[row][rank] /= 2.0
            self._hits[row][rank] += guess == token
            self._trials[row][rank] += 1.0
