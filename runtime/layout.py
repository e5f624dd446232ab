"""How a draft tree becomes sequences: one id per root-to-leaf path, so llama.cpp's mask is the tree mask."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from specrun.bindings.batch import IntArray
from specrun.bindings.errors import OptionError
from specrun.runtime.tree import ROOT

Number = TypeVar("Number", bound=np.generic)

__all__ = ["Move", "TreeLayout", "count_leaves", "layout_tree", "moves_onto"]


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """The sequence ids of a tree in a context with `n_sequences` ids.

    `ids[i]` are the ids of node i: those of all leaves below it. Ids that no leaf needs ride along with the
    first leaf, so that every evaluation names every id (llama.cpp reuses its graph only for equal counts)
    and a chain needs no bookkeeping after acceptance. `flat_ids`, `id_counts`, `depths` and `outputs` describe
    a batch of the root followed by the nodes (read-only); `deepest[s]` is the depth of sequence s.
    """

    ids: tuple[tuple[int, ...], ...]
    flat_ids: IntArray
    id_counts: IntArray
    depths: IntArray
    outputs: npt.NDArray[np.int8]
    deepest: tuple[int, ...]
    n_leaves: int


def count_leaves(parents: tuple[int, ...]) -> int:
    """Return the number of leaves of a tree, at least 1: the root alone is a path too."""
    return max(1, len(parents) - len(set(parents) - {ROOT}))


@functools.lru_cache(maxsize=256)
def layout_tree(parents: tuple[int, ...], n_sequences: int) -> TreeLayout:
    """Return the layout of the tree with these parents; usable if it has at most `n_sequences` leaves."""
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
        flat_ids=_constant(flat, np.int32),
        id_counts=_constant([n_sequences, *map(len, below)], np.int32),
        depths=_constant([0, *depths], np.int32),
        outputs=_constant([1] * (n + 1), np.int8),
        deepest=tuple(deepest),
        n_leaves=len(leaves),
    )


class Move(NamedTuple):
    """What brings one sequence onto the accepted path: it shares `shared` nodes of it already.

    If it `strays`, it holds nodes beside the rest of the path, which have to go first.
    """

    sequence: int
    shared: int
    strays: bool


@functools.lru_cache(maxsize=4096)
def moves_onto(path: tuple[int, ...], parents: tuple[int, ...], n_sequences: int) -> tuple[Move, ...]:
    """Return the moves of all sequences that do not hold the whole of `path`, a path from the root of a tree.

    Rounds repeat a few shapes and paths, so they are worked out once. Raises `OptionError` for what is no path.
    """
    if any(parents[node] != above for above, node in pairwise((ROOT, *path))):
        raise OptionError(f"nodes {list(path)} are not a path from the root of the tree")
    layout = layout_tree(parents, n_sequences)
    moves: list[Move] = []
    for sequence in range(n_sequences):
        shared = sum(sequence in layout.ids[node] for node in path)
        if shared < len(path):
            moves.append(Move(sequence, shared, layout.deepest[sequence] > shared))
    return tuple(moves)


def _constant(values: list[int], kind: type[Number]) -> npt.NDArray[Number]:
    array = np.array(values, kind)
    array.flags.writeable = False
    return array
