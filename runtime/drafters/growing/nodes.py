"""The nodes of a tree that grows in a context, and llama.cpp's sequences, handed out on the way.

A tree that still grows has no final leaves. So the first child of a node goes on in its
parent's sequence, and each further one takes an unused sequence that first shares the parent's
cells. Sharing (`seq_cp`) and dropping (`seq_rm`) walk all cells of the context: a sequence catches
up with the text only when it is taken, in the same walk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from specrun.bindings.contexts.batch import BatchShape
from specrun.bindings.contexts.memory import Memory
from specrun.bindings.errors import OptionError
from specrun.runtime.trees.tree import ROOT


class GrowingNodes:
    """The nodes below a text, numbered from 0 in the order of their evaluation.

    Between drafts sequence s holds exactly the first `synced[s]` cells of the text.
    """

    def __init__(self, memory: Memory, n_sequences: int) -> None:
        self._memory, self.n_sequences = memory, n_sequences
        self.synced = [0] * n_sequences
        self.forget()

    def forget(self) -> None:
        """Forget all nodes; their cells are the caller's to drop."""
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.ids: list[int] = []  # each node's sequence
        self.depths: list[int] = []
        self._free: list[int] = []  # sequences without nodes
        # Whether sequences may hold nodes: an interrupted draft leaves it set. Last, because lists
        # without nodes show nothing of the memory.
        self.grows = False

    def __len__(self) -> int:
        return len(self.parents)

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the evaluated node of a token below another; None if there is none.

        Of equal children it is the first.
        """
        for node, (above, drafted) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if above == parent and drafted == token:
                return node
        return None

    def depth_of(self, node: int) -> int:
        """Return how many nodes lead to an evaluated one, itself included; 0 for ROOT."""
        return 0 if node == ROOT else self.depths[node]

    def cut(self, end: int) -> None:
        """Drop the cells from `end` on, those of nodes among them, of all sequences."""
        # First: an interrupt in between must not leave cells that count as the text's.
        self.synced = [min(synced, end) for synced in self.synced]
        self._memory.truncate(end)

    def note(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Add the nodes of a depth: token i below node `parents[i]`, or ROOT."""
        self.depths += [self.depth_of(parents[0]) + 1] * len(parents)
        self.parents += parents
        self.tokens += tokens

    def add(
        self, parents: Sequence[int], tokens: Sequence[int], main: int, base: int
    ) -> tuple[int, ...]:
        """Add nodes as `note` does; return their sequences, which share all above them.

        Sequence `main` holds the text, of `base` cells.
        """
        above, own, first = self.parents, self.ids, len(self.parents)
        depth = self.depth_of(parents[0])
        if not self.grows:
            self._free = [each for each in range(self.n_sequences) if each != main]
        self.grows = True
        for parent in parents:
            sequence = main if parent == ROOT else own[parent]
            # The first child goes on in its parent's sequence, which costs no walk over the cells.
            if parent in above:
                sequence = self._branched(sequence, base + depth)
            above.append(parent)
            own.append(sequence)
        self.tokens += tokens
        self.depths += [depth + 1] * len(parents)
        return (*own[first:],)

    def _branched(self, source: int, end: int) -> int:
        """Return a sequence without nodes, which now shares all before `end` with another."""
        if not self._free:
            limit = f"the draft context's {self.n_sequences} sequences"
            raise OptionError(f"a draft tree with more paths than {limit}")
        sequence = self._free.pop(0)
        # It holds the text up to `synced`, and shares the rest at once.
        self._memory.branch(source, sequence, self.synced[sequence], end)
        return sequence

    def share_text(self, n_sequences: int, end: int) -> None:
        """Let the first sequences hold the text up to `end`, as sequence 0 does."""
        for sequence in range(1, n_sequences):
            if self.synced[sequence] < end:
                self._memory.branch(0, sequence, self.synced[sequence], end)
                self.synced[sequence] = end


@functools.lru_cache(maxsize=256)
def depth_shape(ids: tuple[int, ...]) -> BatchShape:
    """Return the shape of a depth: one position, siblings side by side in different sequences."""
    return BatchShape.of([0] * len(ids), [(sequence,) for sequence in ids], [1] * len(ids))
