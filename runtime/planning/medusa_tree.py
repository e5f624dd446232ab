"""Medusa's sparse tree (Cai et al. 2024, section 2.3.3): the nodes most likely to be right, one after another.

`accuracy[k][r]` is the measured share of positions at which head k's word of rank r is the right one. The heads do not
know each other's words, so the tree is a part of a cartesian product, and a node is right with the product of the
accuracies on its path. The node of highest value is added until there are enough: a node is worth no more than its
parent, so this greedy choice is the best tree of each size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from specrun.bindings.errors import MalformedFileError, OptionError
from specrun.runtime.drafters.topology import Topology
from specrun.runtime.tree import ROOT

__all__ = ["TYPICAL_ACCURACY", "TYPICAL_PATH_ACCURACY", "accuracy_by_head", "medusa_tree"]

# Where nothing was measured: about what heads reach on their own training domain.
_BY_RANK = (1.0, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008)
TYPICAL_ACCURACY = tuple(tuple(first * share for share in _BY_RANK) for first in (0.6, 0.42, 0.3, 0.22, 0.17))
# Heads that know the path lose little accuracy with depth. These give Hydra's own tree of 63 nodes 3.3 tokens a round;
# Spec-Bench measured 3.26.
TYPICAL_PATH_ACCURACY = tuple(0.6 * share for share in _BY_RANK)


def accuracy_by_head(measured: Sequence[float] | None, n_heads: int) -> Sequence[Sequence[float]] | None:
    """Return the accuracies that stand in a head's file, head after head, as one list for each head.

    None where there are none; raises MalformedFileError for what cannot be the accuracies of so many heads.
    """
    if measured is None:
        return None
    ranks, rest = divmod(len(measured), n_heads)
    if rest or not ranks or any(not 0.0 <= one <= 1.0 for one in measured):
        raise MalformedFileError(
            f"the heads' file has {len(measured)} accuracies for {n_heads} heads: calibrate them again"
        )
    return [measured[head * ranks : (head + 1) * ranks] for head in range(n_heads)]


def medusa_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> Topology:
    """Return the tree of at most `nodes` nodes of highest value; depth k + 1 holds words of head k by rank."""
    if nodes < 1:
        raise OptionError(f"nodes is {nodes}: a Medusa tree has at least 1 node")
    found: list[tuple[tuple[int, ...], float]] = []
    # A path's next sibling and first child are worth no more than it: they enter when it leaves.
    heap: list[tuple[float, int, tuple[int, ...]]] = []
    _push(heap, accuracy, (), 0)
    values: dict[tuple[int, ...], float] = {(): 1.0}
    while heap and len(found) < nodes:
        negative, _, path = heapq.heappop(heap)
        values[path] = -negative
        found.append((path, -negative))
        _push(heap, accuracy, path, 0, values[path])
        _push(heap, accuracy, path[:-1], path[-1] + 1, values[path[:-1]])
    paths = sorted((path for path, _ in found), key=lambda path: (len(path), path))
    places = {(): ROOT} | {path: place for place, path in enumerate(paths)}
    return Topology(tuple(places[path[:-1]] for path in paths))


def _push(
    heap: list[tuple[float, int, tuple[int, ...]]],
    accuracy: Sequence[Sequence[float]],
    parent: tuple[int, ...],
    rank: int,
    value: float = 1.0,
) -> None:
    depth = len(parent)
    if depth < len(accuracy) and rank < len(accuracy[depth]) and accuracy[depth][rank] > 0.0:
        path = (*parent, rank)
        heapq.heappush(heap, (-value * accuracy[depth][rank], len(path), path))
