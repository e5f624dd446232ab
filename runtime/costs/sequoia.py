"""Sequoia's dynamic programme: the tree of N nodes and depth D with the most expected tokens.

Chen et al. 2024. The positional assumption (section 3.1): whether the child of rank r of an
accepted node is the one accepted depends on r alone, with probability `acceptance[r]`. A node is
then accepted with the product of its path's ranks, and a tree yields F = 1 + the sum over its nodes
of these products: the accepted tokens and the target's own.

With V(n, d) the best value of a subtree of at most n nodes, its root among them, and d levels below
that root:

    V(n, d) = 1 + G(0, n - 1, d - 1)
    G(r, m, d) = max(0, max over 1 <= a <= m of acceptance[r] V(a, d) + G(r + 1, m - a, d))

where G(r, m, d) are the children from rank r on (equation 3 and appendix B of the paper, with a
depth limit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.law import FloatArray
from specrun.runtime.tree import ROOT
from specrun.runtime.trees import Topology

MAX_PLANNED_NODES = 256
MAX_PLANNED_DEPTH = 32

# Where nothing was measured: about what small drafters reach on text at temperatures 0.6 to 1.
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
