"""A draft model as the target of a drafter of its own: what evaluates and verifies inside a cascade."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.context import Context
from specrun.runtime.drafters.grafting import graft
from specrun.runtime.target import CachedText, EvaluatedRows, PromptLearner, TargetModel
from specrun.runtime.tree import DraftTree

__all__ = ["JOINED_TOKENS", "DraftModelTarget"]

JOINED_TOKENS = 1
"""How many missing tokens are evaluated with a tree; the context needs as many more output rows."""


class DraftModelTarget(TargetModel):
    """Evaluates trees like `TargetModel`, for text that contains tokens of a larger target's vocabulary.

    The model is fed a stand-in for tokens that it lacks, and rows are cut to the tokens that both models know: one
    outside has probability 0 in the draft, never in the target.

    A few tokens before the last one are evaluated together with the next tree: after a draft that was accepted as
    a whole its last token is still missing, and an evaluation of its own would cost as much as the whole tree.
    """

    def __init__(self, context: Context, *, target_vocab_size: int) -> None:
        super().__init__(context)
        vocabulary = context.model.vocabulary
        self._own_size = vocabulary.size
        self._shared_size = min(self._own_size, target_vocab_size)
        self._lacks_tokens = target_vocab_size > self._own_size
        self._stand_in = vocabulary.eos if vocabulary.eos is not None else 0

    @property
    def n_ctx(self) -> int:
        """The model's context size in tokens."""
        return self.context.n_ctx

    @property
    def native_seconds(self) -> float:
        """Time inside the model's evaluations."""
        return self.context.native_seconds

    @property
    def n_params(self) -> int:
        """The model's parameters."""
        return self.context.model.n_params

    def prefill(self, text: CachedText, end: int, learn: PromptLearner | None = None) -> None:
        """Evaluate the text's tokens up to position `end`, unless so few are missing that they join the next tree."""
        if end - text.n_cached > JOINED_TOKENS:
            super().prefill(text, end, learn)

    def evaluate(self, text: CachedText, tree: DraftTree) -> EvaluatedRows:
        """Evaluate what is missing of the text, its last token at least, and `tree` below it in one llama_decode."""
        if len(text.tokens) - 1 - text.n_cached + len(tree) > self.max_nodes:
            super().prefill(text, len(text.tokens) - 1)
        joined, n_missing = _joined(text, tree)
        rows = self._evaluate_at(text.n_cached, text.tokens[text.n_cached], joined)
        return _Rows(rows, n_missing, self._shared_size)

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        """Keep the evaluated root and these nodes, a path from the root down; drop the others."""
        joined, n_missing = _joined(text, tree)
        self._keep_at(text.n_cached, joined, [*range(n_missing), *(n_missing + node for node in path)])
        text.commit(tree.tokens[node] for node in path)

    def close(self) -> None:
        """Free the context; the model belongs to the weights. Calling it again does nothing."""
        self.context.close()

    def _fed(self, tokens: list[int]) -> list[int]:
        if not self._lacks_tokens:
            return tokens
        return [token if token < self._own_size else self._stand_in for token in tokens]


def _joined(text: CachedText, tree: DraftTree) -> tuple[DraftTree, int]:
    """Return the tree below the first token that is not cached, and how many more such tokens it begins with."""
    missing = text.tokens[text.n_cached + 1 :]
    return graft(DraftTree.chain(missing), len(missing) - 1, tree)[0], len(missing)


class _Rows:
    """An evaluation's rows without those of the first tokens, cut to the tokens of both models."""

    def __init__(self, rows: EvaluatedRows, skipped: int, size: int) -> None:
        self._rows = rows
        self._skipped = skipped
        self._size = size

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of one row, a view of [shared tokens]."""
        return self._rows.logits(row + self._skipped)[: self._size]

    def hidden_state(self, row: int) -> npt.NDArray[np.float32]:
        """Return the final hidden state of one row, [n_embd]."""
        return self._rows.hidden_state(row + self._skipped)

    def layer_input(self, row: int, layer: int) -> npt.NDArray[np.float32]:
        """Return the input of a layer at one row, [n_embd]."""
        return self._rows.layer_input(row + self._skipped, layer)

    def nextn_state(self, row: int) -> npt.NDArray[np.float32]:
        """Return what NextN blocks read of one row, [n_embd_out]."""
        return self._rows.nextn_state(row + self._skipped)
