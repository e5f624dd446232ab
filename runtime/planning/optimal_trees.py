"""Optimal trees: Sequoia's dynamic programme and Medusa's sparse tree."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.laws.law import FloatArray
from specrun.runtime.planning.curves import CostCurve, levelled
from specrun.runtime.trees import Topology
from specrun.runtime.trees.tree import ROOT

# == Sequoia's programme ===========================================================================
#
# Chen et al. 2024. The positional assumption (section 3.1): whether the child of rank r of an
# accepted node is the one accepted depends on r alone, with probability `acceptance[r]`. A node is
# then accepted with the product of its path's ranks, and a tree yields F = 1 + the sum over its
# nodes of these products: the accepted tokens and the target's own.
#
# With V(n, d) the best value of a subtree of at most n nodes, its root among them, and d levels
# below that root:
#
#     V(n, d) = 1 + G(0, n - 1, d - 1)
#     G(r, m, d) = max(0, max over 1 <= a <= m of acceptance[r] V(a, d) + G(r + 1, m - a, d))
#
# where G(r, m, d) are the children from rank r on (equation 3 and appendix B of the paper, with a
# depth limit).


MAX_PLANNED_NODES = 256
MAX_PLANNED_DEPTH = 32

# If nothing was measured: about the accuracy of small drafters on text at temperatures 0.6 to 1.
_TYPICAL = {
    "with": (0.72, 0.08, 0.03, 0.015, 0.008, 0.004),
    "without": (0.72, 0.12, 0.05, 0.025, 0.015, 0.01, 0.007, 0.005),
    "argmax": (0.60, 0.15, 0.07, 0.04, 0.025, 0.015, 0.01, 0.007),
}


def typical_acceptance(sampling: str) -> tuple[float, ...]:
    """Return an acceptance by rank that suits most pairs, for a proposal scheme."""
    return _TYPICAL[sampling]


def expected_tokens(topology: Topology, acceptance: Sequence[float]) -> float:
    """Return F, the tokens a round with this tree yields on average, with the target's own."""
    values: list[float] = []
    siblings = map(enumerate, topology.children.values())
    ranks = {child: rank for children in siblings for rank, child in children}
    for node, parent in enumerate(topology.parents):
        rank = ranks[node]
        own = acceptance[rank] if rank < len(acceptance) else 0.0
        values.append(own * (1.0 if parent == ROOT else values[parent]))
    return 1.0 + sum(values)


def best_tree(acceptance: Sequence[float], nodes: int, depth: int) -> Topology:
    """Return the tree of at most `nodes` nodes and `depth` levels with the most expected tokens."""
    return SequoiaProgramme(acceptance, nodes, depth).tree(nodes, depth)


class SequoiaProgramme:
    """The programme solved for all sizes up to `nodes` and all depths up to `depth`.

    `acceptance` [ranks] are probabilities; ranks beyond it are never accepted. Of equally good
    trees the one with fewer nodes is taken.
    """

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int) -> None:
        if not 0 <= nodes <= MAX_PLANNED_NODES:
            limits = f"0 to {MAX_PLANNED_NODES} nodes"
            raise OptionError(f"a planned tree has {limits}, not {nodes}: lower nodes")
        self._acceptance = np.clip(np.asarray(acceptance, np.float64), 0.0, 1.0)
        if not np.isfinite(self._acceptance).all():
            raise OptionError("acceptance by rank must be made of probabilities")
        self._nodes = nodes
        # A tree of n nodes has at most n levels: deeper ones need not be solved.
        self._depth = max(0, min(depth, nodes, MAX_PLANNED_DEPTH))
        # Children from rank r on, of m nodes, by levels below them: [d][r, m]; taken: of rank r.
        self._forests: list[FloatArray] = []
        self._taken: list[np.ndarray[tuple[int, int], np.dtype[np.intp]]] = []
        # V(n, 0): without levels below it a root is all there is.
        subtree = np.ones(nodes + 1)
        for _ in range(self._depth):
            forest, taken = _solve_level(self._acceptance, subtree)
            self._forests.append(forest)
            self._taken.append(taken)
            subtree = np.ones(nodes + 1)
            # V(n, d) = 1 + G(0, n - 1, d - 1), the children's worth at the next depth.
            subtree[1:] += forest[0, :-1]

    def value(self, nodes: int, depth: int) -> float:
        """Return F of the best tree of at most `nodes` nodes and `depth` levels."""
        level = min(depth, self._depth) - 1
        return 1.0 if level < 0 else 1.0 + float(self._forests[level][0, min(nodes, self._nodes)])

    def tree(self, nodes: int, depth: int) -> Topology:
        """Return the best tree itself."""
        parents: list[int] = []
        # Subtrees still to be laid out, breadth first: (parent, nodes below it, levels below it).
        level = [(ROOT, min(nodes, self._nodes), min(depth, self._depth))]
        while level:
            following: list[tuple[int, int, int]] = []
            for parent, left, below in level:
                for rank in range(len(self._acceptance) if below > 0 else 0):
                    taken = int(self._taken[below - 1][rank, left])
                    if not taken:
                        break
                    following.append((len(parents), taken - 1, below - 1))
                    parents.append(parent)
                    left -= taken
            level = following
        return Topology(tuple(parents))


def _solve_level(
    acceptance: FloatArray, subtree: FloatArray
) -> tuple[FloatArray, np.ndarray[tuple[int, int], np.dtype[np.intp]]]:
    """Return G[r, m] and the nodes of rank r's child (0: none), for children worth `subtree[n]`."""
    ranks, size = len(acceptance), len(subtree)
    forest = np.zeros((ranks + 1, size))
    taken = np.zeros((ranks + 1, size), np.intp)
    # Backwards: G(r, m) is made of G(r + 1, .).
    for rank in range(ranks - 1, -1, -1):
        first = acceptance[rank] * subtree
        for m in range(1, size):
            # Entry a - 1: a nodes go to rank r's child, m - a to the ranks after it.
            totals = first[1 : m + 1] + forest[rank + 1, m - 1 :: -1][:m]
            # The first of equals has the smallest a: nodes that add nothing are not taken.
            best = int(totals.argmax())
            if totals[best] > 0.0:
                forest[rank, m] = totals[best]
                taken[rank, m] = best + 1
    return forest, taken


# == Medusa's sparse tree (Cai et al. 2024, section 2.3.3): always the likeliest node next =========
#
# `accuracy[k][r]` is the measured share of positions at which the token of rank r at depth k is the
# right one (see `heads.file`). A node is right with the product of the accuracies on its path. The
# node of highest value is added until there are enough: a node is worth no more than its parent, so
# this greedy choice is the best tree of each size, and the trees of all sizes lie one in another.
# Which size and depth are worth their cost is the planner's choice: those with the most tokens a
# second, (1 + sum of values) / (T(nodes + 1) + depth * d), where T is the target's cost curve and d
# the cost of a depth of guesses.


# If nothing was measured: about the accuracy of heads on their own training domain.
_BY_RANK = (1.0, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008)
TYPICAL_ACCURACY = tuple(
    tuple(first * share for share in _BY_RANK) for first in (0.6, 0.42, 0.3, 0.22, 0.17)
)
# Heads that read the path lose little accuracy with depth. These give Hydra's own tree of 63 nodes
# 3.3 tokens a round; Spec-Bench measured 3.26.
TYPICAL_PATH_ACCURACY = tuple(0.6 * share for share in _BY_RANK)
_NEVER_RIGHT = "no guess of these heads is ever right: there is no tree to make of them"
_TOLERANCE = 0.01
_MOST_NODES = 63  # with the root as many tokens as cost curves are measured for

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A tree with its expected yield: tokens a round, and the speed-up over plain decoding."""

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
    ordered = sorted(paths, key=lambda path: (len(path), path))
    places = {(): ROOT} | {path: place for place, path in enumerate(ordered)}
    return Topology(tuple(places[path[:-1]] for path in ordered))


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
    is faster, and a user of heads gets the least of them.
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
