"""The probability that a match's continuation holds, learnt from what the target went on to say.

What is retrieved differs in kind: one place, several that agree, several that do not (prediction by
partial matching tells the same cases apart, Cleary & Witten 1984), or a place found again after an
edit. For each kind, length of match and rank among what followed, a Beta law says how often the
next token was that one; its evidence fades, because texts change. Buckets are many and a text is
short, so all of them share one more number, `RecentOdds`. What was retrieved but not drafted is
observed too: so a drafter falls silent within some tokens where nothing holds, whatever
the lengths of its matches, and notices when they become good again, at no cost.

Everything depends on counts alone, so that the same text gives the same drafts.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from specrun.runtime.drafters.likely_trees import RecentOdds

LONGEST_MATCH = 16
"""Matches of more tokens count as this long: they are as good as certain."""

RANKS = 3
"""Continuations told apart by rank; further ones are trusted as the last, and teach nothing."""


class Evidence(IntEnum):
    """What speaks for the next token of the best continuation: the places of the longest match."""

    ONE_PLACE = 0
    SEVERAL_PLACES = 1
    """All of them go on alike."""
    MOST_PLACES = 2
    """A clear majority of them."""
    DISAGREEING = 3
    REALIGNED = 4
    """The place that the text had left for an edit; its match begins anew behind that."""


class Standing(NamedTuple):
    """What is known of a place in a draft: the evidence, and the length of the best match there."""

    evidence: Evidence
    length: int


# Before anything was seen: the odds that a match of L tokens holds are L ** slope / doubt.
_SLOPE = (1.3, 1.3, 1.0, 0.7)
_DOUBT = (4.0, 0.6, 1.2, 1.5)
_REALIGNED = (0.1, 0.55, 0.7)  # by the tokens matched since the edit
_SHARES = (0.6, 0.25, 0.15)  # of what disagrees, the share of each rank
_RUNNERS_UP = (0.25, 0.1)  # of what the first leaves, where the longest do not disagree
_PRIOR_WEIGHT = 5.0  # ... and that belief weighs as much as so many observations
_MEMORY = 48.0  # observations after which the older ones count half: texts change


class MatchTrust:
    """The probability that what followed a match follows again, by evidence, length and rank."""

    def __init__(self) -> None:
        self._seen = [[[0.0] * RANKS for _ in range(LONGEST_MATCH + 1)] for _ in Evidence]
        self._right = [[[0.0] * RANKS for _ in range(LONGEST_MATCH + 1)] for _ in Evidence]
        # The means of all Beta laws, of each evidence and rank by length: each is asked for in many
        # rounds, and moves in few.
        self._means = [[list(lengths) for lengths in ranks] for ranks in _UNSEEN]
        self._lately = RecentOdds()

    def expected(self, standing: Standing, rank: int = 0) -> float:
        """Return the probability that the next token is the known continuation of this rank."""
        means = self._means[standing.evidence][min(rank, RANKS - 1)]
        return self._lately.applied(means[min(standing.length, LONGEST_MATCH)])

    def means_along(self, evidence: Evidence, length: int, count: int) -> list[float]:
        """Return the means of `count` tokens of a chain, each given those before it.

        They are the best known after matches of `length`, `length` + 1, ... tokens.
        """
        by_length = self._means[evidence][0]
        means = by_length[length : length + count]
        return means + [by_length[LONGEST_MATCH]] * (count - len(means))

    def path(self, means: list[float], least: float) -> list[float]:
        """Return how likely a chain of these means is down to each token, while it is `least`."""
        return self._lately.along(means, least)

    def learn(self, standing: Standing, n_known: int, rank: int | None) -> None:
        """Count one observation: of `n_known` continuations the one of this rank came, or none."""
        # Only rank 0 moves the shared number: one observation a token, of the best-known guess.
        self._lately.observe(self.expected(standing), rank == 0)
        length = min(standing.length, LONGEST_MATCH)
        seen, right = self._seen[standing.evidence][length], self._right[standing.evidence][length]
        prior, means = _PRIOR[standing.evidence][length], self._means[standing.evidence]
        for number in range(min(n_known, RANKS)):
            # Each rank has its own Beta law; counts are halved together, so the mean stays.
            seen[number] += 1.0
            right[number] += rank == number
            if seen[number] > _MEMORY:
                seen[number] /= 2.0
                right[number] /= 2.0
            means[number][length] = _mean(prior[number], seen[number], right[number])

    def forget(self) -> None:
        """Return to what is believed before anything was seen."""
        self.__init__()  # type: ignore[misc]  # all state is there


def _priors(evidence: Evidence, length: int) -> list[float]:
    if evidence is Evidence.REALIGNED:
        first = _REALIGNED[min(length, len(_REALIGNED) - 1)]
    elif not length:
        return [0.0] * RANKS
    else:
        odds = length ** _SLOPE[evidence] / _DOUBT[evidence]
        first = odds / (odds + 1.0)
        if evidence is Evidence.DISAGREEING:
            return [first * share for share in _SHARES]
    return [first, *((1.0 - first) * share for share in _RUNNERS_UP)]


_PRIOR = [
    [_priors(evidence, length) for length in range(LONGEST_MATCH + 1)] for evidence in Evidence
]


def _mean(prior: float, seen: float, right: float) -> float:
    """Return the mean of a Beta law that began as the prior."""
    return (right + _PRIOR_WEIGHT * prior) / (seen + _PRIOR_WEIGHT)


_UNSEEN = [
    [[_mean(ranks[rank], 0.0, 0.0) for ranks in lengths] for rank in range(RANKS)]
    for lengths in _PRIOR
]
