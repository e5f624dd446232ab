"""From several retrieved continuations to one draft tree: a trie weighted by match and frequency, its best nodes.

LLMA (Yang et al. 2023) and prompt lookup copy one continuation; REST (He et al. 2023, section 3.2) merges all of
them into a trie and keeps the most frequent prefixes. Here a node's probability is estimated: its parent's, times
the trust in a match that long, times its share among the continuations that agree so far. Nodes are taken in that
order, and as many as gain more tokens than their evaluation costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrun.runtime.drafters.match_trust import LONGEST_MATCH, MatchTrust
from specrun.runtime.planning.cost_curves import CostCurve
from specrun.runtime.tree import ROOT, DraftTree, Draw

__all__ = ["Continuation", "TreeLimits", "continuation_tree", "teach"]

_LEAST_GAIN = 1.1  # expected speed-up from which a round is drafted for: Python costs something too
_LEAST_PROBABILITY = 0.05  # no batch is so cheap that such a node pays


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed an earlier occurrence of the last `match` tokens; `weight` ranks equal matches.

    `votes` are what it counts among others: a token more of context counts double, up to where no doubt is left.
    """

    tokens: Sequence[int]
    match: int
    weight: float = 1.0
    votes: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "votes", self.weight * 2.0 ** min(self.match, LONGEST_MATCH))


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """The largest tree of one round."""

    nodes: int
    depth: int
    leaves: int


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node that may be taken: the continuations that run through it, and the probability that it is right."""

    probability: float
    parent: int
    token: int
    depth: int
    alive: Sequence[Continuation]


def continuation_tree(
    continuations: Sequence[Continuation], trust: MatchTrust, limits: TreeLimits, costs: CostCurve
) -> DraftTree:
    """Return the best nodes as point masses; empty where no draft would pay."""
    taken = _best_first(continuations, trust, limits)
    return _tree(taken[: _worthwhile([one.probability for one in taken], costs)])


def teach(trust: MatchTrust, continuations: Sequence[Continuation], tokens: Sequence[int]) -> None:
    """Tell `trust` how the continuations fared against the tokens that really came, drafted or not."""
    alive = continuations
    for depth, token in enumerate(tokens):
        alive = [one for one in alive if len(one.tokens) > depth]
        if not alive:
            return
        length = depth + max(one.match for one in alive)
        alive = [one for one in alive if one.tokens[depth] == token]
        trust.learn(length, bool(alive))


def _best_first(continuations: Sequence[Continuation], trust: MatchTrust, limits: TreeLimits) -> list[_Branch]:
    taken: list[_Branch] = []
    if limits.nodes < 1 or limits.depth < 1:
        return taken
    has_child: set[int] = set()
    leaves = 1
    queue: list[tuple[float, int, _Branch]] = []
    serial = 0
    branches = _children(1.0, ROOT, 0, continuations, trust)
    while True:
        for one in branches:
            if one.probability >= _LEAST_PROBABILITY:
                heapq.heappush(queue, (-one.probability, serial, one))
                serial += 1
        if not queue or len(taken) == limits.nodes:
            return taken
        best = heapq.heappop(queue)[2]
        branches = []
        if best.parent in has_child:
            if leaves == limits.leaves:
                continue
            leaves += 1
        has_child.add(best.parent)
        taken.append(best)
        if best.depth < limits.depth:
            branches = _children(best.probability, len(taken) - 1, best.depth, best.alive, trust)


def _children(
    probability: float, parent: int, depth: int, alive: Sequence[Continuation], trust: MatchTrust
) -> list[_Branch]:
    """Return what the continuations through a node at `depth` have next, the likeliest first."""
    if len(alive) == 1:  # the usual case by far
        only = alive[0]
        if len(only.tokens) <= depth:
            return []
        known = probability * trust.expected(only.match + depth)
        return [_Branch(known, parent, only.tokens[depth], depth + 1, alive)]
    alive = [one for one in alive if len(one.tokens) > depth]
    if not alive:
        return []
    groups: dict[int, list[Continuation]] = {}
    votes: dict[int, float] = {}
    for one in alive:
        token = one.tokens[depth]
        if token in groups:
            groups[token].append(one)
            votes[token] += one.votes
        else:
            groups[token] = [one]
            votes[token] = one.votes
    longest = max(one.match for one in alive)
    scale = probability * trust.expected(longest + depth) / sum(votes.values())
    return [_Branch(scale * votes[token], parent, token, depth + 1, own) for token, own in groups.items()]


def _worthwhile(probabilities: Sequence[float], costs: CostCurve) -> int:
    """Return how many of the nodes give the most expected tokens for their evaluation's time."""
    best, rate, tokens = 0, _LEAST_GAIN / costs.seconds(1), 1.0
    for count, probability in enumerate(probabilities, 1):
        tokens += probability
        achieved = tokens / costs.seconds(count + 1)
        if achieved > rate:
            best, rate = count, achieved
    return best


def _tree(nodes: Sequence[_Branch]) -> DraftTree:
    draws: dict[int, tuple[Draw, ...]] = {}
    for index, one in enumerate(nodes):
        draws[one.parent] = (*draws.get(one.parent, ()), Draw(index))
    return DraftTree(
        tokens=tuple(one.token for one in nodes),
        parents=tuple(one.parent for one in nodes),
        depths=tuple(one.depth for one in nodes),
        is_candidate=(True,) * len(nodes),
        draws=draws,
    )
