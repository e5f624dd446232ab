"""Text embeddings: the final states of a text's tokens, pooled to one vector of length 1.

For models that were trained for it: their file says how states are pooled, which others lack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import ContextFullError, OptionError, UnsupportedModelError
from specrun.bindings.models.model import Model

Vector = npt.NDArray[np.float32]
_MOST_ROWS = 512


class TextEmbedder:
    """Makes embeddings with a model that others may use meanwhile; for one thread at a time.

    Raises `UnsupportedModelError` for a model that makes none. It has a context of its own: close
    it before the model, or use it as a context manager.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        pooling = model.pooling
        if pooling is None:
            raise UnsupportedModelError(f"{model.path.name} writes texts and makes no embeddings")
        self.pooling = pooling
        rows = min(_MOST_ROWS, options.n_batch)
        own = dataclasses.replace(options, n_batch=rows, n_outputs=rows, hidden_states=True)
        self._context = Context(model, own)
        self._batch = Batch(self._context.n_batch, 1)
        self._width = model.n_embd

    def embed(self, tokens: Sequence[int]) -> Vector:
        """Return the embedding of a text, float32 of shape [n_embd] and length 1."""
        if not tokens:
            raise OptionError("the text is empty: an embedding needs a token at least")
        if len(tokens) > self._context.n_ctx:
            has = f"the text has {len(tokens)} tokens and the context {self._context.n_ctx}"
            raise ContextFullError(f"{has}: shorten it, or raise -c")
        pooled = self._pooled(tokens)
        length = float(np.linalg.norm(pooled))
        return (pooled / length if length > 0.0 else pooled).astype(np.float32)

    def _pooled(self, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the pooled states of a text."""
        self._context.memory.clear()
        pooled = np.zeros(self._width)
        for start in range(0, len(tokens), self._batch.capacity):
            piece = tokens[start : start + self._batch.capacity]
            self._batch.fill_chain(piece, start, [0], len(piece))
            rows = self._context.decode(self._batch)
            states = rows.hidden_states(range(len(piece))).astype(np.float64)
            if self.pooling == "mean":
                pooled = pooled + states.sum(axis=0) / len(tokens)
                continue
            pooled = states[0 if self.pooling == "first" else -1]
            if self.pooling == "first":
                break
        return pooled

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def __enter__(self) -> TextEmbedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
