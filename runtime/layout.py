"""How a draft tree becomes sequences: one id per root-to-leaf path, so llama.cpp's mask is the tree mask."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from specrun.bindings.batch import IntArray
from specrun.runtime.tree import ROOT

__all__ = ["TreeLayout", "count_leaves", "layout_tree"]


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """The sequence ids of a tree in a context with `n_sequences` ids.

    `ids[i]` are the ids of node i: those of all leaves below it. Ids that no leaf needs ride along with the
    first leaf, so that every evaluation names every id (llama.cpp reuses its graph only for equal counts)
    and a chain needs no bookkeeping after acceptance. `flat_ids` and `id_counts` describe a batch of the
    root followed by the nodes; `deepest[s]` is the depth of sequence s.
    """

    ids: tuple[tuple[int, ...], ...]
    flat_ids: IntArray
    id_counts: IntArray
    depths: IntArray
    deepest: tuple[int, ...]


def count_leaves(parents: tuple[int, ...]) -> int:
    """Return the number of leaves of a tree, at least 1: the root alone is a path too."""
    return max(1, len(parents) - len(set(parents) - {ROOT}))


@functools.lru_cache(maxsize=256)
def layout_tree(parents: tuple[int, ...], n_sequences: int) -> TreeLayout:
    """Return the layout of the tree with these parents; it must not have more than `n_sequences` leaves."""
    n = len(parents)
    inner = set(parents)
    leaves = [node for node in range(n) if node not in inner] or [ROOT]
    below: list[list[int]] = [[] for _ in range(n)]
    depths = [0] * n
    for node, parent in enumerate(parents):
        depths[node] = 1 if parent == ROOT else depths[parent] + 1
    deepest = [0] * n_sequences
    for sequence in range(n_sequences):
        node = leaves[sequence] if sequence < len(leaves) else leaves[0]
        deepest[sequence] = 0 if node == ROOT else depths[node]
        while node != ROOT:
            below[node].append(sequence)
            node = parents[node]
    flat = [*range(n_sequences)]
    for ids in below:
        flat.extend(ids)
    return TreeLayout(
        ids=tuple(map(tuple, below)),
        flat_ids=np.array(flat, np.int32),
        id_counts=np.array([n_sequences, *map(len, below)], np.int32),
        depths=np.array([0, *depths], np.int32),
        deepest=tuple(deepest),
    )
