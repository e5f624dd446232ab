"""One number that many estimates share: how much better or worse than they say things have been
lately, in log-odds.

Estimates by class learn slowly where classes are many and a text is short; this one is moved by
every observation, so a change of text shows within some tokens.
"""

from __future__ import annotations

import math

_STEP, _FADING, _FURTHEST = 0.25, 0.95, 2.5  # for one surprise, per observation, at most


class RecentOdds:
    """A shift of log-odds that fades. It depends on what was observed alone, never on time."""

    def __init__(self) -> None:
        self._shift = 0.0

    def applied(self, probability: float) -> float:
        """Return an estimate shifted by what was seen lately; what is certain stays so."""
        if not self._shift or not 0.0 < probability < 1.0:
            return probability
        return 1.0 / (1.0 + (1.0 / probability - 1.0) * math.exp(-self._shift))

    def observe(self, expected: float, came: bool) -> None:
        """Learn whether what had the probability `expected` came."""
        self._shift = max(
            -_FURTHEST, min(_FURTHEST, _FADING * self._shift + _STEP * (came - expected))
        )
