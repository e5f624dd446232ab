"""Draft trees as sequences of llama.cpp: tree attention by the causal mask of sequence ids.

Each root-to-leaf path has a sequence id, which all nodes on it carry, so that llama.cpp's causal
mask by sequence is the tree's mask (`TreeLayout`). After acceptance all ids are brought onto the
accepted path again (`moves_onto`). The likeliest path is evaluated first (`arrange_tree`), so that
its cells lie behind the text's in the order of their positions: attention sums over cells in the
order in which they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import NamedTuple

from specrun.bindings.contexts.batch import BatchShape
from specrun.bindings.errors import OptionError
from specrun.runtime.trees.tree import ROOT

FILLER = 0
"""The token of nodes that only fill an evaluation and are never accepted."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """The sequence ids of a tree among the ids that its text has.

    `ids[i]` are the ids of node i: those of all leaves below it. Ids that no leaf needs ride along
    with the first leaf, so that every evaluation names every id (llama.cpp reuses its graph only
    for equal counts) and a chain needs no bookkeeping after acceptance. `shape` is that of a batch
    of the root followed by the nodes; `deepest[s]` is the depth of the s-th sequence, `depth` the
    greatest of them.
    """

    ids: tuple[tuple[int, ...], ...]
    shape: BatchShape
    deepest: tuple[int, ...]
    depth: int
    n_leaves: int


def count_leaves(parents: tuple[int, ...]) -> int:
    """Return the number of leaves of a tree, at least 1: the root alone is a path too."""
    return max(1, len(parents) - len(set(parents) - {ROOT}))


@functools.lru_cache(maxsize=256)
def layout_tree(parents: tuple[int, ...], n_sequences: int, first: int = 0) -> TreeLayout:
    """Return the layout of a tree of at most `n_sequences` leaves, in ids from `first` on."""
    n = len(parents)
    inner = set(parents)
    leaves = [node for node in range(n) if node not in inner] or [ROOT]
    below: list[list[int]] = [[] for _ in range(n)]
    depths = [0] * n
    for node, parent in enumerate(parents):
        depths[node] = 1 if parent == ROOT else depths[parent] + 1
    deepest = [0] * n_sequences
    # Sequence s is the path to leaf s, walked from the leaf up.
    for sequence in range(n_sequences):
        node = leaves[sequence] if sequence < len(leaves) else leaves[0]
        deepest[sequence] = 0 if node == ROOT else depths[node]
        while node != ROOT:
            below[node].append(first + sequence)
            node = parents[node]
    # The root carries every id: all paths start from it. Siblings share a position, which is their
    # depth and not their place in the batch.
    every_id = range(first, first + n_sequences)
    shape = BatchShape.of([0, *depths], [every_id, *below], [1] * (n + 1))
    ids = tuple(map(tuple, below))
    return TreeLayout(ids, shape, tuple(deepest), max(deepest, default=0), len(leaves))


class Arrangement(NamedTuple):
    """The order in which a round's tokens are evaluated: pending ones, a tree, and a filling.

    `parents` are those of all nodes below the first token that is not cached. `places[row]` is the
    place of the root (row 0) and of the nodes among them, the first token being at place 0. `order`
    are the tree's nodes in the order of evaluation.
    """

    parents: tuple[int, ...]
    places: tuple[int, ...]
    order: tuple[int, ...]

    def n_in_place(self, path: Sequence[int]) -> int:
        """Return how many nodes of an accepted path lie right behind the root, in order."""
        after_root = enumerate(path, self.places[0] + 1)
        return sum(1 for _ in takewhile(lambda at: self.places[at[1] + 1] == at[0], after_root))


@functools.lru_cache(maxsize=256)
def arrange_tree(
    parents: tuple[int, ...], is_candidate: tuple[bool, ...], n_pending: int, width: int = 0
) -> Arrangement:
    """Arrange a tree behind `n_pending` accepted tokens that are not cached; its root is the next.

    Nodes are visited depth first. Drafters list the likeliest of siblings first, so the likeliest
    path comes first; nodes that are no candidates come after their siblings. Nodes below the last
    place fill the evaluation up to `width` tokens, on a path that no other node sees.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    waiting = [ROOT]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if node in children:
            # Taken from the end: the first candidate comes next, others last.
            children[node].reverse()
            waiting += sorted(children[node], key=is_candidate.__getitem__)
    places = dict(zip(order, range(n_pending, n_pending + len(order)), strict=True))
    order.remove(ROOT)
    # A node's number below the first token is its place less 1.
    before = range(ROOT, n_pending - 1)
    tree = [places[parents[node]] - 1 for node in order]
    n_filled = 1 + len(before) + len(tree)
    filling = [ROOT, *range(n_filled - 1, width - 2)] if n_filled < width else []
    in_rows = (*map(places.__getitem__, range(ROOT, len(parents))),)
    return Arrangement((*before, *tree, *filling), in_rows, tuple(order))


def require_path(path: Sequence[int], parents: tuple[int, ...]) -> None:
    """Raise `OptionError` unless these nodes are a path from the root down."""
    if any(parents[node] != above for above, node in pairwise((ROOT, *path))):
        raise OptionError(f"nodes {list(path)} are not a path from the root of the tree")


class Move(NamedTuple):
    """The operations that bring a sequence onto the accepted path, of which it has `shared` nodes.

    If it `strays`, it holds nodes beside the rest of the path, which have to go first.
    """

    sequence: int
    shared: int
    strays: bool


@functools.lru_cache(maxsize=4096)
def moves_onto(
    path: tuple[int, ...], parents: tuple[int, ...], n_sequences: int, first: int = 0
) -> tuple[Move, ...]:
    """Return the moves of all sequences that do not hold the whole of `path` from the root.

    Rounds repeat a few shapes and paths, so they are worked out once. Raises `OptionError` if this
    is no path.
    """
    require_path(path, parents)
    layout = layout_tree(parents, n_sequences, first)
    moves: list[Move] = []
    for sequence, deepest in enumerate(layout.deepest, first):
        # A sequence holds a path from the root: its common part is the beginning of this one.
        shared = sum(sequence in layout.ids[node] for node in path)
        if shared < len(path):
            moves.append(Move(sequence, shared, deepest > shared))
    return tuple(moves)
