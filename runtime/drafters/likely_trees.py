"""Trees of point masses by estimated probability: best-first growth, cut where drafting pays best.

Lookahead decoding, prompt lookup and REST draft tokens that followed the same context before. Each
estimates how likely such a token is to come again; their use of the estimates is the same and
stands here. Estimates depend on counts of tokens alone, never on time, so that the same text leads
to the same drafts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from specrun.runtime.planning import CostCurve
from specrun.runtime.trees.tree import ROOT

State = TypeVar("State")


class Guess(NamedTuple):
    """A node: the probability of its whole path, its parent (the number of a guess) and token."""

    probability: float
    parent: int
    token: int


@dataclass(slots=True)  # not frozen: that costs a call for every field, in every round
class TreeLimits:
    """The largest tree of one round; below `end_tokens` there is nothing to draft."""

    nodes: int
    depth: int
    leaves: int
    end_tokens: frozenset[int] = frozenset()


def grow_likely(
    root: State,
    children: Callable[[State], Iterable[tuple[int, float, State]]],
    limits: TreeLimits,
    least: float,
) -> list[Guess]:
    """Return the most probable nodes below a root, parents before children, within the limits.

    `children(state)` yields the tokens that may follow a node, each with its probability given the
    path and the state of the node that it makes. Nodes under the probability `least` are left out.
    """
    taken: list[Guess] = []
    has_child: set[int] = set()
    n_leaves, serial = 1, 0
    # (-probability, serial, parent, depth, token, state): of equals the first found comes first.
    queue: list[tuple[float, int, int, int, int, State]] = []

    def expand(probability: float, place: int, level: int, state: State) -> None:
        nonlocal serial
        for token, share, below in children(state):
            # A child is never more probable than its parent, so a cut here cuts all below it too.
            if probability * share >= least:
                heapq.heappush(queue, (-probability * share, serial, place, level, token, below))
                serial += 1

    if limits.nodes > 0 and limits.depth > 0:
        expand(1.0, ROOT, 1, root)
    while queue and len(taken) < limits.nodes:
        value, _, parent, level, token, state = heapq.heappop(queue)
        # One leaf is one llama.cpp sequence, of which there are few; nodes on a path are free.
        if parent in has_child:  # a second child makes one leaf more, a first one none
            # Skipped, and not the end: less likely first children may still fit.
            if n_leaves == limits.leaves:
                continue
            n_leaves += 1
        has_child.add(parent)
        taken.append(Guess(-value, parent, token))
        if level < limits.depth and token not in limits.end_tokens:
            expand(-value, len(taken) - 1, level + 1, state)
    return taken


def most_worthwhile(
    probabilities: Sequence[float], curve: CostCurve, least_gain: float, beside: int = 0
) -> tuple[int, float]:
    """Return how many guesses, the first ones, yield the most tokens a second; and that rate.

    n of them, whose paths have these probabilities, yield 1 + their sum in T(1 + n), with `beside`
    other nodes in T(1 + beside + n). None are drafted unless they gain `least_gain` over drafting
    none.
    """
    # The root is evaluated in any case, and its token is the 1 that every round yields.
    seconds, first = curve.seconds, 1 + beside
    best, rate, tokens = 0, least_gain / seconds(first), 1.0
    # All counts are tried, not up to the first loss: a cost curve has steps where kernels change.
    for count, probability in enumerate(probabilities, 1):
        tokens += probability
        achieved = tokens / seconds(first + count)
        if achieved > rate:
            best, rate = count, achieved
    return best, rate
