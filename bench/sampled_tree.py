"""A drafter for measuring only: a two-level tree sampled without replacement from a draft model's laws.

It stands in for tree drafters where the cost of trees is measured, and is no example of a good one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.bindings.batch import Batch
from specrun.bindings.context import Context
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.transform import Logits, transformed_law
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

__all__ = ["SampledTreeDrafter"]


class SampledTreeDrafter(Drafter):
    """Draws `children` tokens below the root and `grandchildren` below each of them.

    Each sibling is drawn from the draft model's law without the earlier ones (Sequoia, Chen et al. 2024), so
    all nodes differ. `context` needs as many sequences and output rows as there are children.
    """

    def __init__(self, context: Context, children: int, grandchildren: int) -> None:
        self.name = f"tree {children}x{grandchildren}"
        self.max_leaves = children * grandchildren
        self.max_nodes = children + children * grandchildren
        self._context = context
        self._children = children
        self._grandchildren = grandchildren
        self._ids = np.arange(children, dtype=np.int32)
        self._ones = np.ones(children, np.int32)
        self._flags = np.ones(children, np.int8)
        self._batch = Batch(context.n_batch, children)
        self._cached = 0

    @property
    def native_seconds(self) -> float:
        """Time inside the draft model's evaluations."""
        return self._context.native_seconds

    def begin(self, tokens: Sequence[int]) -> None:
        """Start with an empty cache."""
        self._context.memory.clear()
        self._cached = 0

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree of two levels, or none where it would not fit."""
        start = len(request.tokens)
        if request.max_depth < 2 or request.max_nodes < self.max_nodes or start >= self._context.n_ctx:
            return DraftTree()
        builder = TreeBuilder()
        law = transformed_law(self._feed(request.tokens), request.params)
        request.noise.seek(start)
        tokens = _grow(builder, ROOT, law, self._children, request.noise)
        n = len(tokens)
        self._batch.fill(tokens, self._ones[:n] * start, self._ones[:n], self._ids[:n], self._flags[:n])
        rows = self._context.decode(self._batch)
        request.noise.seek(start + 1)
        for node in range(n):  # the children are the tree's first nodes, in the order of their rows
            law = transformed_law(rows.logits(node), request.params)
            _grow(builder, node, law, self._grandchildren, request.noise)
        return builder.build()

    def observe(self, outcome: RoundOutcome) -> None:
        """Drop the drafted level; what was accepted is evaluated again with the next root."""
        self._context.memory.truncate(self._cached)

    def close(self) -> None:
        """Free the draft model's context and the model."""
        self._context.close()
        self._context.model.close()

    def _feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate the committed tokens that are not cached, for all children, and return the last row."""
        n_batch = self._context.n_batch
        for start in range(self._cached, len(tokens), n_batch):
            piece = tokens[start : start + n_batch]
            last = start + n_batch >= len(tokens)
            self._batch.fill_chain(piece, start, self._ids, int(last))
            rows = self._context.decode(self._batch)
        self._cached = len(tokens)
        return rows.logits(0)


def _grow(builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource) -> list[int]:
    """Draw `count` different tokens below `parent`, as far as the law has them; return them."""
    tokens: list[int] = []
    while True:
        tokens.append(noise.choose(law))
        builder.add(parent, tokens[-1], law)
        if len(tokens) == count:
            return tokens
        rest = law.without(tokens[-1])
        if rest is law:  # sure of that token: there is no other to draw
            return tokens
        law = rest
