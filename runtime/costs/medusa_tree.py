"""Medusa's sparse tree (Cai et al. 2024, section 2.3.3): always the likeliest node next.

`accuracy[k][r]` is the measured share of positions at which the token of rank r at depth k is the
right one (see `heads.node_accuracy`). A node is right with the product of the accuracies on its
path. The node of highest value is added until there are enough: a node is worth no more than its
parent, so this greedy choice is the best tree of each size, and the trees of all sizes lie one in
another. Which size and depth are worth their cost is the planner's choice: those with the most
tokens a second, (1 + sum of values) / (T(nodes + 1) + depth * d), where T is the target's cost
curve and d what a depth of guesses costs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.costs.curves import CostCurve
from specrun.runtime.tree import ROOT
from specrun.runtime.trees import Topology

# Where nothing was measured: about what heads reach on their own training domain.
_BY_RANK = (1.0, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008)
TYPICAL_ACCURACY = tuple(
    tuple(first * share for share in _BY_RANK) for first in (0.6, 0.42, 0.3, 0.22, 0.17)
)
# Heads that know the path lose little accuracy with depth. These give Hydra's own tree of 63 nodes
# 3.3 tokens a round; Spec-Bench measured 3.26.
TYPICAL_PATH_ACCURACY = tuple(0.6 * share for share in _BY_RANK)
_NEVER_RIGHT = "no guess of these heads is ever right: there is no tree to make of them"
_TOLERANCE = 0.01
_MOST_NODES = 63  # with the root as many tokens as cost curves are measured for

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A tree with what it should yield: tokens a round, and the speed-up over plain decoding."""

    topology: Topology
    expected_tokens: float
    speed_up: float


def medusa_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> Topology:
    """Return the most valuable tree of up to `nodes` nodes; depth k + 1 has head k's ranks."""
    if nodes < 1:
        raise OptionError(f"nodes is {nodes}: a tree of guesses has at least 1 node")
    paths = [path for path, _ in itertools.islice(_by_value(accuracy), nodes)]
    if not paths:
        raise OptionError(_NEVER_RIGHT)
    return _topology(paths)


def plan_medusa_tree(
    accuracy: Sequence[Sequence[float]],
    curve: CostCurve,
    seconds_per_depth: float = 0.0,
    *,
    most: int = _MOST_NODES,
    tolerance: float = _TOLERANCE,
) -> HeadPlan:
    """Return the tree of 1 to `most` nodes with the most tokens a second.

    The smallest tree is taken that is at most `tolerance` slower than the best: fewer nodes are
    fewer guesses about the machine. The plan's `speed_up` may be less than 1: then plain decoding
    is faster, and who asked for heads gets the least of them.
    """
    plans: list[tuple[float, float, int, int]] = []  # speed-up, expected tokens, nodes, depth
    # Every depth has its price, so the trees of all sizes are tried for each.
    for depth in range(1, len(accuracy) + 1):
        expected = 1.0
        for nodes, (_, value) in enumerate(itertools.islice(_by_value(accuracy[:depth]), most), 1):
            expected += value
            seconds = curve.seconds(nodes + 1) + depth * seconds_per_depth
            plans.append((expected * curve.seconds(1) / seconds, expected, nodes, depth))
    if not plans:
        raise OptionError(_NEVER_RIGHT)
    least = (1.0 - tolerance) * max(plans)[0]
    good = [plan for plan in plans if plan[0] >= least]
    speed_up, expected, nodes, depth = min(good, key=lambda plan: (plan[2], -plan[0]))
    return HeadPlan(medusa_tree(accuracy[:depth], nodes), expected, speed_up)


def _by_value(accuracy: Sequence[Sequence[float]]) -> Iterator[tuple[Path, float]]:
    """Yield the nodes that can be right, by falling value, parents and earlier siblings first."""
    rows = [levelled(row) for row in accuracy]
    values: dict[Path, float] = {(): 1.0}
    heap: list[tuple[float, int, Path]] = []

    def push(parent: Path, rank: int) -> None:
        depth = len(parent)
        if depth < len(rows) and rank < len(rows[depth]) and rows[depth][rank] > 0.0:
            path = (*parent, rank)
            # Of equal values the shorter path first: a parent of accuracy 1 must come before its
            # child.
            heapq.heappush(heap, (-values[parent] * rows[depth][rank], len(path), path))

    # A path's next sibling and first child are worth no more than it: they enter when it leaves.
    push((), 0)
    while heap:
        negative, _, path = heapq.heappop(heap)
        values[path] = -negative
        yield path, -negative
        push(path, 0)
        push(path[:-1], path[-1] + 1)


def levelled(row: Sequence[float]) -> list[float]:
    """Return shares that do not rise with rank: runs that do, by noise, become their mean.

    Whoever drafts a later token drafts the earlier ones too: only the sum counts, which stays.
    """
    groups: list[tuple[float, int]] = []  # sum and length of runs of equal shares
    for share in row:
        total, length = share, 1
        # Pool adjacent violators, the means compared as products: no division on the way.
        while groups and groups[-1][0] * length < total * groups[-1][1]:
            before = groups.pop()
            total, length = total + before[0], length + before[1]
        groups.append((total, length))
    return [total / length for total, length in groups for _ in range(length)]


def _topology(paths: list[Path]) -> Topology:
    ordered = sorted(paths, key=lambda path: (len(path), path))
    places = {(): ROOT} | {path: place for place, path in enumerate(ordered)}
    return Topology(tuple(places[path[:-1]] for path in ordered))
