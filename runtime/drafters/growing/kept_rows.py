"""A drafter's own rows of one round, for rules that weigh its distributions (`DraftTree.rows`).

A row is a view that dies with the next evaluation of the model or head. If a rule reads all rows,
they are copied into memory that each draft uses again, so they die with the next draft. The row
after a leaf is evaluated when it is read: only a draft that was accepted down to the leaf needs it,
and a draft model's next draft would evaluate that token anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrun.bindings.errors import StaleViewError
from specrun.runtime.laws.transform import Logits
from specrun.runtime.trees.tree import ROOT, DraftTree


class RowMemory:
    """Memory for copies of rows, of one conversation.

    Fresh memory of a row's size comes from the system page by page, which takes ten times as long
    as the copy.
    """

    def __init__(self) -> None:
        self._rows: list[Logits] = []
        self._used = 0
        self.generation = 0

    def reuse(self) -> int:
        """Begin a draft: the copies of the last one are dead. Return the draft's number."""
        self._used = 0
        self.generation += 1
        return self.generation

    def copy_of(self, row: Logits) -> Logits:
        """Return a copy of a row."""
        if self._used == len(self._rows):
            self._rows.append(row.copy())
        else:
            room = self._rows[self._used]
            if room.shape == row.shape and room.dtype == row.dtype:
                room[:] = row
            else:
                self._rows[self._used] = row.copy()
        self._used += 1
        return self._rows[self._used - 1]


class EvaluatedNodes(Protocol):
    """The nodes of a tree that a drafter evaluated, numbered in their order."""

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the node of a token below another (or ROOT), None if none is."""

    def leaf(self, parent: int, token: int) -> tuple[int, Logits] | None:
        """Evaluate a token below a node; return its number and its row, None without room."""

    def root(self) -> Logits | None:
        """Evaluate the text alone; return the row after it, None if there is none."""


class DepthNodes:
    """Nodes whose rows depend on their depth alone: each depth counts as one (`EvaluatedNodes`)."""

    def place_of(self, parent: int, token: int) -> int:
        """Return the number of the depth below another."""
        return parent + 1

    def leaf(self, parent: int, token: int) -> None:
        """Return None: nothing is evaluated late."""

    def root(self) -> None:
        """Return None: likewise."""


class KeptRows:
    """The rows of a tree's nodes, alive for one round: all with `copies`, else the latest ones.

    The latest rows are those of the last evaluation, and those of leaves, which are evaluated here.
    """

    def __init__(self, memory: RowMemory, nodes: EvaluatedNodes, *, copies: bool) -> None:
        self._memory, self._generation, self._copies = memory, memory.reuse(), copies
        self._nodes, self.n_taken = nodes, 0
        self._rows: dict[int, Logits] = {}
        # Not the tree that is returned: it would keep itself, and its rows, alive.
        self._tree = DraftTree()

    def take(self, first: int, rows: Sequence[Logits]) -> None:
        """Note the rows of nodes that were evaluated just now, numbered from `first` on."""
        if self._copies:
            rows = [*map(self._memory.copy_of, rows)]
        else:
            self._rows.clear()  # the others die with this evaluation
        self._rows.update(enumerate(rows, first))
        self.n_taken += len(rows)

    def of(self, tree: DraftTree) -> DraftTree:
        """Return the tree with its rows."""
        self._tree = tree
        return DraftTree(
            tree.tokens, tree.parents, tree.depths, tree.is_candidate, tree.draws, self
        )

    def logits(self, node: int) -> Logits | None:
        """Return the row after a node (or ROOT), None if there is none.

        Raises `StaleViewError` once the next draft has begun.
        """
        if self._generation != self._memory.generation:
            raise StaleViewError("the rows of a draft died with the drafter's next draft")
        if node != ROOT and not self._tree.is_candidate[node]:
            return None
        place, path = ROOT, [self._tree.tokens[above] for above in self._tree.path_to(node)]
        for depth, token in enumerate(path, 1):
            below = self._nodes.place_of(place, token)
            if below is None:
                found = self._nodes.leaf(place, token) if depth == len(path) else None
                return None if found is None else self._keep(*found)
            place = below
        if place == ROOT and ROOT not in self._rows and not self._tree.draws:
            row = self._nodes.root()
            return None if row is None else self._keep(ROOT, row)
        return self._rows.get(place)

    def _keep(self, place: int, row: Logits) -> Logits:
        # The walk reads a node's row once; a second reader gets the same numbers.
        if not self._copies:
            self._rows.clear()
        self._rows[place] = row = self._memory.copy_of(row)
        return row
