"""A draft model's cache while a tree grows in it depth by depth.

A tree that is still growing does not know its leaves, so llama.cpp's sequence ids are handed out on the way: the
first child of a node goes on in its parent's sequence, each further one takes an unused sequence that first shares
the parent's cells. Sharing (`seq_cp`) and dropping (`seq_rm`) walk all cells of the context, about 14 us at 4,096
of them; so a sequence catches up with the committed text only when it is taken, in the same walk.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.context import Context, Rows
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.draft_model_state import DraftModelState
from specrun.runtime.prefix import common_prefix
from specrun.runtime.tree import ROOT

__all__ = ["DraftTreeState"]


class DraftTreeState(DraftModelState):
    """Committed tokens as in `DraftModelState`, and below the last one the evaluated nodes of a growing tree.

    Between rounds sequence s holds exactly the first `_synced[s]` cached tokens; `main` holds all of them.
    Nodes are numbered from 0 in the order of their evaluation.
    """

    def __init__(self, context: Context, *, target_vocab_size: int) -> None:
        super().__init__(context, target_vocab_size=target_vocab_size)
        self._n_sequences = context.options.n_sequences
        self._synced = [0] * self._n_sequences
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._ids: list[int] = []
        self._places: dict[tuple[int, int], int] = {}
        self._tips: dict[int, int] = {}  # the deepest node of each sequence in use
        # Those whose sequence a child has taken over. First to fill and last to be emptied: it marks a round under way.
        self._inherited: set[int] = set()

    def rewind(self, length: int) -> None:
        """Cut the cache to `length` tokens; drop all nodes, and what an interrupted round may have left."""
        memory = self.context.memory
        interrupted = bool(self._inherited)
        if interrupted or length < len(self.cached) or memory.last_position(self.main) >= length:
            # The cache comes last: an interrupt in between must not leave tokens that are not cached.
            self._synced = [min(synced, length) for synced in self._synced]
            del self.cached[length:]
            memory.truncate(length)
        if interrupted:
            # Sequences taken by a round that never ended may or may not share the text already.
            for sequence in range(self._n_sequences):
                if sequence != self.main:
                    memory.truncate(self._synced[sequence], sequence=sequence)
            self._forget_nodes()

    def evaluate(self, parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """Evaluate the next depth in one batch: token i below node `parents[i]` (ROOT: the last cached token)."""
        base = len(self.cached)
        depth = 1 if parents[0] == ROOT else self._depths[parents[0]] + 1
        ids = [self._sequence_for(parent, base + depth - 1) for parent in parents]
        for parent, token, sequence in zip(parents, tokens, ids, strict=True):
            self._places.setdefault((parent, token), len(self._parents))
            self._tips[sequence] = len(self._parents)
            self._parents.append(parent)
            self._depths.append(depth)
            self._ids.append(sequence)
        positions = [base + depth - 1] * len(tokens)
        self.batch.fill([self.known(token) for token in tokens], positions, None, ids, [1] * len(tokens))
        return self.context.decode(self.batch)

    def _sequence_for(self, parent: int, end: int) -> int:
        """Return the sequence of the next child of `parent`; it holds all positions before `end`."""
        source = self.main if parent == ROOT else self._ids[parent]
        if parent not in self._inherited:
            self._inherited.add(parent)
            return source
        for sequence in range(self._n_sequences):
            if sequence != self.main and sequence not in self._tips:
                break
        else:
            raise OptionError(f"a draft tree with more paths than the draft context's {self._n_sequences} sequences")
        self._tips[sequence] = parent
        self.context.memory.branch(source, sequence, self._synced[sequence], end)
        return sequence

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep the nodes that spell the beginning of `tokens`, now committed, and drop the others."""
        path: list[int] = []
        node = ROOT
        for token in tokens:
            child = self._places.get((node, token))
            if child is None:
                break
            path.append(child)
            node = child
        if not self._parents:
            return
        base = len(self.cached)
        end = base + len(path)
        memory = self.context.memory
        if max(self._depths) > len(path):
            memory.truncate(end)  # one walk drops everything deeper, for all sequences
        for sequence, tip in self._tips.items():
            own = self._path_to(tip)
            shared = common_prefix(own, path)
            if min(len(own), len(path)) > shared:
                memory.truncate(base + shared, end, sequence)
            self._synced[sequence] = base + shared
        if path:
            self.main = self._ids[path[-1]]
            self._synced[self.main] = end
            self.cached.extend(tokens[: len(path)])
        self._forget_nodes()

    def _path_to(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self._parents[node]
        path.reverse()
        return path
