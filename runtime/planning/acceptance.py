"""The chance that a drafted token is accepted, learnt while decoding.

`AcceptanceOdds` calibrates a certainty. Of a drafter with a distribution that is a probability of
this. Copies from a text have no distribution, but kinds and ranks: `MatchAcceptance` counts
those, and calibrates the usual worth of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_BIAS = 0.4  # accepted tokens are likelier than by the drafter
_PRIOR = (4.0, 2.0)  # weights of the first bias and slope, in Newton's matrix
_MEMORY = 0.98  # of observations
_SURE = 8.0  # log-odds beyond which certainties are alike


class AcceptanceOdds:
    """The chance that a drafted token is accepted, by the drafter's certainty.

    Log-odds are `bias + slope x`, x the log-odds of the certainty. Observations fade, so that it
    follows the text.
    """

    def __init__(
        self, slope: float, *, bias: float = _BIAS, weights: tuple[float, float] = _PRIOR
    ) -> None:
        self._start, self._prior = (bias, slope), weights
        self.bias, self.slope = bias, slope
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
        a, c = a + self._prior[0], c + self._prior[1]
        # The inverse of [[a, b], [b, c]] times the gradient (1, x) error.
        share = error / (a * c - b * b)
        self.bias += share * (c - b * x)
        self.slope = max(0.0, self.slope + share * (a * x - b))

    def recover(self, share: float) -> None:
        """Go back this share of the way to the prior, in a round that drafted nothing."""
        bias, slope = self._start
        self.bias += share * (bias - self.bias)
        self.slope += share * (slope - self.slope)


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)), cut to the range in which certainties differ."""
    if probability <= 0.0:
        return -_SURE
    if probability >= 1.0:
        return _SURE
    return max(-_SURE, min(_SURE, math.log(probability / (1.0 - probability))))


_KIND_WEIGHT = 4.0  # observations of a kind that its calibrated prior weighs as much as
_POOLED = (8.0, 8.0)  # weights of the first bias and slope of all kinds together
_FADES = 32.0  # observations after which the older ones count half: texts change


class MatchAcceptance:
    """The chance that the tokens after a match follow again, by the kind of match and the rank.

    A guess that is a point mass is accepted exactly if it is the token that comes. So every token
    of a text shows whether each guess would have been accepted, drafted or not: the counts cost
    nothing and depend on tokens alone. Each kind and rank has a Beta distribution, which
    begins at a prior (`priors`, by kind and rank) and fades. Kinds are many and a text is short, so
    those of the best guesses learn from one another: their priors are certainties that one
    `AcceptanceOdds` calibrates. If no short match is false, short matches are trusted as long
    ones are; if nothing holds, a drafter falls silent within some tokens.
    """

    def __init__(self, priors: Sequence[Sequence[float]]) -> None:
        self.priors, self.ranks = priors, len(priors[0])
        # None if nothing is to be calibrated.
        self._certainties = [log_odds(p[0]) if 0.0 < p[0] < 1.0 else None for p in priors]
        self.forget()

    def forget(self) -> None:
        """Return to the values before any observation."""
        self._seen = [[0.0] * self.ranks for _ in self.priors]
        self._right = [[0.0] * self.ranks for _ in self.priors]
        self._odds = AcceptanceOdds(1.0, bias=0.0, weights=_POOLED)

    def chance(self, kind: int, rank: int = 0) -> float:
        """Return the chance of the continuation of this rank; further ranks are as the last."""
        if rank == 0:
            return self.chances((kind,))[0]
        rank = min(rank, self.ranks - 1)
        right, seen = self._right[kind][rank], self._seen[kind][rank]
        return (right + _KIND_WEIGHT * self.priors[kind][rank]) / (seen + _KIND_WEIGHT)

    def chances(self, kinds: Iterable[int]) -> list[float]:
        """Return the chances of the best continuations of several kinds."""
        # Every round needs a dozen of them, so nothing is called for each.
        bias, slope, exp = self._odds.bias, self._odds.slope, math.exp
        found = []
        for kind in kinds:
            x = self._certainties[kind]
            prior = self.priors[kind][0] if x is None else 1.0 / (1.0 + exp(-bias - slope * x))
            right = self._right[kind][0] + _KIND_WEIGHT * prior
            found.append(right / (self._seen[kind][0] + _KIND_WEIGHT))
        return found

    def learn(self, kinds: Sequence[int], rank: int | None) -> None:
        """Count one token: of continuations of these kinds, by rank, it was that one, or none."""
        # Only rank 0 moves the common part: one observation a token, of the best-known guess.
        x = self._certainties[kinds[0]]
        if x is not None:
            self._odds.learn(x, rank == 0)
        for number, kind in enumerate(kinds[: self.ranks]):
            seen, right = self._seen[kind], self._right[kind]
            # Counts are halved together, so the mean stays.
            seen[number] += 1.0
            right[number] += rank == number
            if seen[number] > _FADES:
                seen[number] /= 2.0
                right[number] /= 2.0
