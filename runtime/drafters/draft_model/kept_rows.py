"""A draft model's own rows of one round, kept for rules that weigh its laws (`DraftTree.rows`).

A row is a view that dies with the model's next evaluation, so rows are copied where a rule reads
them all, into memory that each draft uses again: they die with the next draft. The one after the
last token of a draft is evaluated when it is asked for: only a draft that was kept whole needs it,
and the next draft would evaluate that token anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.errors import StaleViewError
from specrun.runtime.drafters.draft_model.state import DraftModelState, DraftTreeState
from specrun.runtime.transform import Logits
from specrun.runtime.tree import ROOT, DraftTree


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

    def require(self, generation: int) -> None:
        """Raise `StaleViewError` where another draft has begun since."""
        if generation != self.generation:
            raise StaleViewError("these rows of a draft model died with its next draft: copy them")


class ChainRows:
    """Rows of a chain's nodes below `tokens`; with `copies` all, else the last one."""

    def __init__(
        self, state: DraftModelState, memory: RowMemory, tokens: Sequence[int], *, copies: bool
    ) -> None:
        self._state, self._tokens, self._copies = state, tokens, copies
        self._memory, self._generation = memory, memory.reuse()
        self._start = len(tokens)
        self._rows: dict[int, Logits] = {}
        self._drafted: Sequence[int] = ()

    def take(self, node: int, row: Logits) -> None:
        """Note the row after a node, which was evaluated just now."""
        if self._copies:
            row = self._memory.copy_of(row)
        else:
            self._rows.clear()  # the others die with this evaluation
        self._rows[node] = row

    def of(self, tree: DraftTree) -> DraftTree:
        """Return the chain with its rows."""
        self._drafted = tree.tokens
        return DraftTree(
            tree.tokens, tree.parents, tree.depths, tree.is_candidate, tree.draws, self
        )

    def logits(self, node: int) -> Logits | None:
        """Return the row after a node, evaluated now if it is that of the chain's last token.

        Raises `StaleViewError` once the next draft has begun.
        """
        self._memory.require(self._generation)
        row = self._rows.get(node)
        if row is None and node == len(self._drafted) - 1 and self._has_room:
            state = self._state
            if self._drafted:
                row = state.feed_one(self._drafted[-1])
            else:
                state.rewind(min(len(state.cached), self._start - 1))
                row = state.feed(self._tokens[len(state.cached) : self._start])
            self._rows[node] = row  # nothing is evaluated before the next draft
        return row

    @property
    def _has_room(self) -> bool:
        return self._state.room([*self._tokens, *self._drafted]) >= 0


class TreeRows:
    """Rows of a tree's nodes below `tokens`; with `copies` all that the draft evaluated.

    A tree that branches evaluates what has children: only leaves are missing then.
    """

    def __init__(
        self, state: DraftTreeState, memory: RowMemory, tokens: Sequence[int], *, copies: bool
    ) -> None:
        self._state, self._tokens, self._copies = state, tokens, copies
        self._memory, self._generation = memory, memory.reuse()
        self._start = len(tokens)
        self._rows: dict[int, Logits] = {}  # by the number of the evaluated node
        self._tree = DraftTree()

    def take(self, first: int, rows: Sequence[Logits]) -> None:
        """Note the rows of evaluated nodes, numbered from `first` on."""
        if self._copies:
            copied = self._memory.copy_of
            self._rows.update((node, copied(row)) for node, row in enumerate(rows, first))

    def of(self, tree: DraftTree) -> DraftTree:
        """Return the tree with its rows."""
        # Not the tree that is returned: it would keep itself, and its rows, alive.
        self._tree = tree
        return DraftTree(
            tree.tokens, tree.parents, tree.depths, tree.is_candidate, tree.draws, self
        )

    def logits(self, node: int) -> Logits | None:
        """Return the row after a node; a leaf's is evaluated now.

        Raises `StaleViewError` once the next draft has begun.
        """
        self._memory.require(self._generation)
        state, place = self._state, ROOT
        path = [self._tree.tokens[above] for above in self._tree.path_to(node)]
        for depth, token in enumerate(path, 1):
            below = state.place_of(place, token)
            if below is None:
                if depth < len(path) or not self._has_room(state.n_nodes + 1):
                    return None
                row = state.shared(state.evaluate([place], [token]).logits(0))
                return self._keep(state.n_nodes - 1, row)
            place = below
        if place == ROOT and ROOT not in self._rows and not path and not self._tree.draws:
            return self._root()
        return self._rows.get(place)

    def _root(self) -> Logits | None:
        state = self._state
        if not self._has_room(0):
            return None
        state.rewind(min(len(state.cached), self._start - 1))
        return self._keep(ROOT, state.feed(self._tokens[len(state.cached) : self._start]))

    def _keep(self, place: int, row: Logits) -> Logits:
        # The walk reads a node's row once; whoever asks again gets the same numbers.
        self._rows[place] = row = self._memory.copy_of(row)
        return row

    def _has_room(self, nodes: int) -> bool:
        return self._state.room(self._tokens) >= nodes
