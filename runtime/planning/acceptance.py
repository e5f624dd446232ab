"""The chance that a drafted token is accepted, learnt while decoding."""

from __future__ import annotations

import math

_BIAS = 0.4  # accepted tokens are likelier than the drafter says
_PRIOR = (4.0, 2.0)  # weights of the first bias and slope, in Newton's matrix
_MEMORY = 0.98  # of observations
_SURE = 8.0  # log-odds beyond which certainties are alike


class AcceptanceOdds:
    """The chance that a drafted token is accepted, by the drafter's certainty.

    Log-odds are `bias + slope x`, x the log-odds of the certainty. Observations fade, so that it
    follows the text.
    """

    def __init__(self, slope: float) -> None:
        self._start = slope
        self.bias, self.slope = _BIAS, slope
        self._weights = (0.0, 0.0, 0.0)  # Newton's matrix without the prior's

    def chance(self, x: float) -> float:
        """Return the probability of being accepted."""
        return 1.0 / (1.0 + math.exp(-self.log_odds(x)))

    def log_odds(self, x: float) -> float:
        """Return the log-odds of being accepted."""
        return self.bias + self.slope * x

    def level(self, x: float) -> int:
        """Return the log-odds of being accepted as a whole number."""
        return round(max(-_SURE, min(_SURE, self.log_odds(x))))

    def learn(self, x: float, accepted: bool) -> None:
        """Take one step of Newton's towards this observation."""
        chance = self.chance(x)
        weight, error = chance * (1.0 - chance), accepted - chance
        a, b, c = (_MEMORY * old for old in self._weights)
        self._weights = a, b, c = a + weight, b + weight * x, c + weight * x * x
        a, c = a + _PRIOR[0], c + _PRIOR[1]
        # The inverse of [[a, b], [b, c]] times the gradient (1, x) error.
        share = error / (a * c - b * b)
        self.bias += share * (c - b * x)
        self.slope = max(0.0, self.slope + share * (a * x - b))

    def recover(self, share: float) -> None:
        """Go back this share of the way to the prior, in a round that drafted nothing."""
        self.bias += share * (_BIAS - self.bias)
        self.slope += share * (self._start - self.slope)


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)), cut to the range in which certainties differ."""
    if probability <= 0.0:
        return -_SURE
    if probability >= 1.0:
        return _SURE
    return max(-_SURE, min(_SURE, math.log(probability / (1.0 - probability))))
