"""A drafter's own rows of one round, kept for rules that weigh its laws (`DraftTree.rows`).

A row is a view that dies with the model's or head's next evaluation, so rows are copied where a
rule reads them all, into memory that each draft uses again: they die with the next draft. The one
after the last token of a draft is evaluated when it is asked for: only a draft that was kept whole
needs it, and a draft model's next draft would evaluate that token anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from specrun.bindings.errors import StaleViewError
from specrun.runtime.laws.transform import Logits
from specrun.runtime.round.drafter import DraftRequest
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


def copies_rows(request: DraftRequest, *, points: bool) -> bool:
    """Return whether a request asks for the rows of all places, not only the last one.

    `points` says that drafts are chosen, not drawn: a draw says its law itself; so does, at
    temperature 0, the token that was drafted.
    """
    return request.keep == "rows" or (points and not request.params.is_greedy)


class KeptRows(ABC):
    """What the two kinds share: rows by the number of their evaluation, alive for one round."""

    def __init__(self, memory: RowMemory, *, copies: bool) -> None:
        self._memory, self._generation, self._copies = memory, memory.reuse(), copies
        self._rows: dict[int, Logits] = {}
        # Not the tree that is returned: it would keep itself, and its rows, alive.
        self._tree = DraftTree()

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
        return self._found(node)

    @abstractmethod
    def _found(self, node: int) -> Logits | None:
        """Return the row after a node, evaluated now if need be."""


After = Callable[[Sequence[int]], Logits | None]
"""Evaluates the last of the drafted tokens; without any, the text. None: there is no room."""


class ChainRows(KeptRows):
    """Rows of a chain's nodes; with `copies` all, else the last one. `after` evaluates that."""

    def __init__(self, memory: RowMemory, after: After, *, copies: bool) -> None:
        super().__init__(memory, copies=copies)
        self._after = after

    def take(self, node: int, row: Logits) -> None:
        """Note the row after a node, which was evaluated just now."""
        if self._copies:
            row = self._memory.copy_of(row)
        else:
            self._rows.clear()  # the others die with this evaluation
        self._rows[node] = row

    def _found(self, node: int) -> Logits | None:
        row = self._rows.get(node)
        tokens = self._tree.tokens
        if row is None and node == len(tokens) - 1:
            row = self._after(tokens)
            if row is not None:
                self._rows[node] = row  # nothing is evaluated before the next draft
        return row


class EvaluatedNodes(Protocol):
    """The nodes of a tree that a drafter evaluated, numbered in their order."""

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the node of a token below another (or ROOT), None if none is."""

    def leaf(self, parent: int, token: int) -> tuple[int, Logits] | None:
        """Evaluate a token below a node; return its number and its row, None without room."""

    def root(self) -> Logits | None:
        """Evaluate the text alone; return the row after it, None if there is none."""


class TreeRows(KeptRows):
    """Rows of a tree's nodes; with `copies` all that the draft evaluated.

    A tree that branches evaluates what has children: only leaves are missing then.
    """

    def __init__(self, memory: RowMemory, nodes: EvaluatedNodes, *, copies: bool) -> None:
        super().__init__(memory, copies=copies)
        self._nodes = nodes

    def take(self, first: int, rows: Sequence[Logits]) -> None:
        """Note the rows of evaluated nodes, numbered from `first` on."""
        if self._copies:
            copied = self._memory.copy_of
            self._rows.update((node, copied(row)) for node, row in enumerate(rows, first))

    def _found(self, node: int) -> Logits | None:
        place = ROOT
        path = [self._tree.tokens[above] for above in self._tree.path_to(node)]
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
        # The walk reads a node's row once; whoever asks again gets the same numbers.
        self._rows[place] = row = self._memory.copy_of(row)
        return row
