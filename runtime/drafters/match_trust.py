"""How far the continuation of a match can be trusted, learnt from what the target went on to say."""

from __future__ import annotations

__all__ = ["LONGEST_MATCH", "MatchTrust"]

LONGEST_MATCH = 16
"""Matches of more tokens count as this long: they are as good as certain."""

_DOUBT = 1.5  # a match of so many tokens is believed half the time, before anything was seen
_PRIOR_WEIGHT = 4.0  # ... and that belief weighs as much as so many observations
_MEMORY = 32  # observations after which the older ones count half: texts change


class MatchTrust:
    """For each length of a match, how often the next token was among those that had followed it before.

    It depends on counts alone, so that the same text gives the same drafts. What was retrieved but not drafted
    is observed too: a drafter that has fallen silent notices when matches become good again.
    """

    def __init__(self) -> None:
        self._seen = [0.0] * (LONGEST_MATCH + 1)
        self._right = [0.0] * (LONGEST_MATCH + 1)

    def expected(self, length: int) -> float:
        """Return the probability that the next token is a known continuation of a match of `length` tokens."""
        length = min(length, LONGEST_MATCH)
        prior = length / (length + _DOUBT)
        return (self._right[length] + _PRIOR_WEIGHT * prior) / (self._seen[length] + _PRIOR_WEIGHT)

    def learn(self, length: int, right: bool) -> None:
        """Count one observation."""
        length = min(length, LONGEST_MATCH)
        self._seen[length] += 1.0
        self._right[length] += right
        if self._seen[length] > _MEMORY:
            self._seen[length] /= 2.0
            self._right[length] /= 2.0

    def forget(self) -> None:
        """Return to what is believed before anything was seen."""
        self.__init__()  # type: ignore[misc]  # all state is there
