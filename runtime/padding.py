"""Padding: a batch is filled up to a width that costs less.

Kernels of quantized weights may take less time for 8 tokens than for 5. Where that was measured, a
round's evaluation gets tokens that nobody reads. They hang one below the other under the tree's
last node: so they see it, no node sees them, no sequence is added, and the sequences of all nodes
are what they would be. What is accepted does not know of them, and a commit drops them with all
else that is deeper than the path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs
from specrun.runtime.target import CachedText, EvaluatedRows, TargetModel
from specrun.runtime.tree import DraftTree
from specrun.runtime.tree_layout import FILLER

Parents = tuple[int, ...]

Wider = Callable[[int, int], int]
"""Returns how many tokens to evaluate in place of the first number, at most the second."""


def paddings(wider: Wider, widest: int, most: int) -> dict[int, int]:
    """Return the widths from 2 to `widest` that are padded, and to how many, at most `most`."""
    return {n: to for n in range(2, widest + 1) if (to := wider(n, most)) > n}


class PaddedTarget(TargetModel):
    """A target that pads the evaluations of rounds whose width is among `widths`, while they fit.

    Its model can branch: a recurrent state would take in what fills a batch.
    """

    def __init__(
        self,
        context: Context,
        widths: Mapping[int, int],
        inputs: EmbeddingInputs | None = None,
    ) -> None:
        super().__init__(context, inputs)
        self._widths = widths
        self._filled: tuple[Parents, Parents] = ((), ())  # the last tree, and as it was evaluated

    def _evaluate_at(self, start: int, tokens: list[int], parents: Parents) -> EvaluatedRows:
        width = self._widths.get(len(tokens), 0)
        # Each node needs a cell, and a position: at the end of the context there are too few.
        fits = 0 < width <= self.context.n_ctx - start
        evaluated = filled(parents, width) if fits else parents
        self._filled = parents, evaluated
        filling = [FILLER] * (len(evaluated) - len(parents))
        return super()._evaluate_at(start, tokens + filling, evaluated)

    def _commit_in_place(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        if not tree.parents:
            self._keep_at(text.n_cached, (), ())  # a root alone may have been filled up, too
        super()._commit_in_place(text, tree, path)

    def _keep_at(self, root: int, parents: Parents, path: Sequence[int]) -> None:
        before, evaluated = self._filled
        super()._keep_at(root, evaluated if before == parents else parents, path)


@functools.lru_cache(maxsize=256)
def filled(parents: Parents, width: int) -> Parents:
    """Return a tree whose evaluation, with the root, has `width` tokens; its nodes come first."""
    # The last node is a leaf, because parents come before their children: as the last of all
    # leaves, its path keeps the number of its sequence when it grows.
    return (*parents, *range(len(parents) - 1, width - 2))
