"""The chance that a drafted token is accepted, learnt while decoding.

A drafter with a distribution says how certain it is: `AcceptanceOdds` calibrates that. What is
copied from a text has no distribution, but kinds and ranks: `MatchAcceptance` counts those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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


_STEP, _FADING, _FURTHEST = 0.25, 0.95, 2.5  # for one surprise, per observation, at most


class RecentOdds:
    """How much better or worse than estimated tokens were lately, as a shift of log-odds.

    Estimates by kind learn slowly, for kinds are many and a text is short. All of them share this
    one number, which every observation moves: a change of text shows within some tokens.
    """

    def __init__(self) -> None:
        self._shift = 0.0
        self._factor = 1.0  # exp(-shift), by which the odds against are multiplied

    def applied(self, probability: float) -> float:
        """Return an estimate shifted by what was seen lately; what is certain stays so."""
        # A shift of 0 returns the very number, so that plans do not depend on rounding.
        if not self._shift or not 0.0 < probability < 1.0:
            return probability
        return 1.0 / (1.0 + (1.0 / probability - 1.0) * self._factor)

    def along(self, probabilities: Iterable[float], least: float) -> list[float]:
        """Return how likely a path is down to each of its places, as far as it reaches `least`.

        The estimates are of the places, each given those before it; `applied` shifts every one.
        """
        factor, is_shifted, path = self._factor, bool(self._shift), 1.0
        likely: list[float] = []
        for probability in probabilities:
            if is_shifted and 0.0 < probability < 1.0:
                path *= 1.0 / (1.0 + (1.0 / probability - 1.0) * factor)
            else:
                path *= probability
            if path < least:
                break
            likely.append(path)
        return likely

    def observe(self, expected: float, came: bool) -> None:
        """Learn whether what had the probability `expected` came."""
        # Only surprise moves the shift: what came as often as expected lets it fade to 0.
        shift = _FADING * self._shift + _STEP * (came - expected)
        self._shift = max(-_FURTHEST, min(_FURTHEST, shift))
        self._factor = math.exp(-self._shift)


_PRIOR_WEIGHT = 5.0  # observations that the first belief weighs as much as
_FADES = 48.0  # observations after which the older ones count half: texts change


class MatchAcceptance:
    """The chance that what followed a match follows again, by the kind of match and the rank.

    A guess that is a point mass is accepted exactly if it is the token that comes. So every token
    of a text shows whether each guess would have been accepted, drafted or not: what is counted
    costs nothing and depends on tokens alone. A Beta distribution for each kind and rank has a
    prior (`priors`, by kind and rank) and fades; all of them share a `RecentOdds`. So a drafter
    falls silent within some tokens if nothing holds, and notices when guesses become good again.
    """

    def __init__(self, priors: Sequence[Sequence[float]]) -> None:
        self.priors, self.ranks = priors, len(priors[0])
        self.forget()

    def forget(self) -> None:
        """Return to what is believed before anything was seen."""
        kinds = range(len(self.priors))
        self._seen = [[0.0] * self.ranks for _ in kinds]
        self._right = [[0.0] * self.ranks for _ in kinds]
        # By rank and kind: each mean is needed in many rounds, and moves in few.
        self._means = [
            [_mean(prior[rank], 0.0, 0.0) for prior in self.priors] for rank in range(self.ranks)
        ]
        self._lately = RecentOdds()

    def chance(self, kind: int, rank: int = 0) -> float:
        """Return the chance of the continuation of this rank; further ranks are as the last."""
        return self._lately.applied(self._means[min(rank, self.ranks - 1)][kind])

    def means(self, kinds: slice) -> list[float]:
        """Return the means of the best continuations of some kinds, without recent odds."""
        return self._means[0][kinds]

    def along(self, means: Iterable[float], least: float) -> list[float]:
        """Return how likely a chain of these means is down to each token, while it is `least`."""
        return self._lately.along(means, least)

    def learn(self, kinds: Sequence[int], rank: int | None) -> None:
        """Count one token: of continuations of these kinds, by rank, it was that one, or none."""
        # Only rank 0 moves the shared number: one observation a token, of the best-known guess.
        self._lately.observe(self.chance(kinds[0]), rank == 0)
        for number, kind in enumerate(kinds[: self.ranks]):
            seen, right = self._seen[kind], self._right[kind]
            # Counts are halved together, so the mean stays.
            seen[number] += 1.0
            right[number] += rank == number
            if seen[number] > _FADES:
                seen[number] /= 2.0
                right[number] /= 2.0
            prior = self.priors[kind][number]
            self._means[number][kind] = _mean(prior, seen[number], right[number])


def _mean(prior: float, seen: float, right: float) -> float:
    """Return the mean of a Beta distribution that began as the prior."""
    return (right + _PRIOR_WEIGHT * prior) / (seen + _PRIOR_WEIGHT)
