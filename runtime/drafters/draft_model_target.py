"""A draft model as the target of a drafter of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.context import Context
from specrun.runtime.drafters.grafting import graft
from specrun.runtime.target import EvaluatedRows, TargetModel
from specrun.runtime.tree import DraftTree

__all__ = ["JOINED_TOKENS", "DraftModelTarget"]

JOINED_TOKENS = 1
"""How many missing tokens are evaluated with a tree; the context needs as many more output rows."""


class DraftModelTarget:
    """Evaluates trees like `TargetModel`, for text that contains words of a larger target's vocabulary.

    `tokens` are the tokens of the text, of which the model is fed a stand-in where it lacks the word. Rows are cut
    to the words that both models know: a word outside has probability 0 in the draft, never in the target.

    A few tokens before the last one are evaluated together with the next tree: after a draft that was accepted as
    a whole its last token is still missing, and an evaluation of its own would cost as much as the whole tree.
    """

    def __init__(self, context: Context, *, target_vocab_size: int) -> None:
        self.tokens: list[int] = []
        self._context = context
        self._model = TargetModel(context)
        vocabulary = context.model.vocabulary
        self._own_size = vocabulary.size
        self._shared_size = min(self._own_size, target_vocab_size)
        self._lacks_words = target_vocab_size > self._own_size
        self._stand_in = vocabulary.eos if vocabulary.eos is not None else 0
        self._evaluated = DraftTree(), 0, 0  # the tree, the token above it, and how many more came before

    @property
    def n_ctx(self) -> int:
        """The model's context size in tokens."""
        return self._context.n_ctx

    @property
    def max_nodes(self) -> int:
        """The most tree nodes one evaluation can take beside the root."""
        return self._model.max_nodes

    @property
    def native_seconds(self) -> float:
        """Time inside the model's evaluations."""
        return self._context.native_seconds

    @property
    def n_params(self) -> int:
        """The model's parameters."""
        return self._context.model.n_params

    def rewind(self, length: int) -> None:
        """Drop everything after the first `length` tokens, and what an interrupted round left behind."""
        self._model.rewind(min(length, len(self._model.tokens)))
        del self.tokens[length:]

    def prefill(self, tokens: Sequence[int]) -> None:
        """Commit more tokens, without output rows."""
        self.tokens.extend(tokens)
        if len(self._missing) > JOINED_TOKENS:
            self._evaluate_missing()

    def evaluate(self, pending: int, tree: DraftTree) -> EvaluatedRows:
        """Evaluate `pending` (the last committed token) and `tree` below it in one llama_decode."""
        if len(self._missing) + len(tree) > self._model.max_nodes:
            self._evaluate_missing()
        first, *chain = [*self._missing, pending]
        joined, _ = graft(DraftTree.chain(chain), len(chain) - 1, tree)
        if self._lacks_words:
            joined = dataclasses.replace(joined, tokens=tuple(map(self._known, joined.tokens)))
        rows = self._model.evaluate(self._known(first), joined)
        self._evaluated = tree, pending, len(chain)
        return _Rows(rows, len(chain), self._shared_size)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the evaluated root and these nodes, a path from the root down; drop the others."""
        tree, pending, joined = self._evaluated
        self._model.commit([*range(joined), *(joined + node for node in path)])
        self.tokens += [pending, *(tree.tokens[node] for node in path)]

    def close(self) -> None:
        """Free the context; the model belongs to the weights. Calling it again does nothing."""
        self._context.close()

    @property
    def _missing(self) -> list[int]:
        return self.tokens[len(self._model.tokens) :]

    def _evaluate_missing(self) -> None:
        self._model.prefill([self._known(token) for token in self._missing])

    def _known(self, token: int) -> int:
        return token if token < self._own_size else self._stand_in


class _Rows:
    """An evaluation's rows without those of the first tokens, cut to the words of both models."""

    def __init__(self, rows: EvaluatedRows, skipped: int, size: int) -> None:
        self._rows = rows
        self._skipped = skipped
        self._size = size

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of one row, a view of [shared words]."""
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
