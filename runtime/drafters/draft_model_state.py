"""A draft model's context and the committed tokens it has cached: what every drafter with a model keeps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.batch import Batch
from specrun.bindings.context import Context
from specrun.runtime.transform import Logits

__all__ = ["DraftModelState"]


class DraftModelState:
    """Evaluates committed tokens for sequence `main` and knows which of them are cached.

    `cached` are exactly the tokens that `main` holds. The draft model may know fewer words than the target:
    it is fed a stand-in for those it lacks, and its rows are cut to the words that both know, so that the
    others have probability 0 in the draft, never in the target.
    """

    def __init__(self, context: Context, *, target_vocab_size: int) -> None:
        self.context = context
        self.cached: list[int] = []
        self.main = 0
        self.batch = Batch(context.n_batch, 1)
        self._own_size = context.model.vocabulary.size
        self._shared_size = min(self._own_size, target_vocab_size)
        eos = context.model.vocabulary.eos
        self._stand_in = eos if eos is not None else 0

    def known(self, token: int) -> int:
        """Return the token, or a word that stands in for one that the draft model lacks."""
        return token if token < self._own_size else self._stand_in

    def shared(self, logits: Logits) -> Logits:
        """Return a row cut to the words of both models, a view."""
        return logits[: self._shared_size]

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after the cached ones and return the last one's logits, a view of [shared words]."""
        if len(tokens) == 1:
            return self.feed_one(tokens[0])
        n_batch = self.context.n_batch
        for begin in range(0, len(tokens), n_batch):
            piece = list(tokens[begin : begin + n_batch])
            n, start = len(piece), len(self.cached)
            known = [self.known(token) for token in piece]
            # Rows of earlier pieces are asked for too: one row each is cheaper than a second kind of batch.
            self.batch.fill(known, range(start, start + n), None, [self.main] * n, _last_of(n))
            rows = self.context.decode(self.batch)
            self.cached.extend(piece)
        return self.shared(rows.logits(0))

    def feed_one(self, token: int) -> Logits:
        """Evaluate one token after the cached ones and return its logits, a view of [shared words]."""
        self.batch.fill_one(self.known(token), len(self.cached), self.main)
        rows = self.context.decode(self.batch)
        self.cached.append(token)
        return self.shared(rows.logits(0))

    def rewind(self, length: int) -> None:
        """Cut the cache to `length` tokens, and drop what an interrupted evaluation may have left."""
        if length < len(self.cached) or self.context.memory.last_position(self.main) >= length:
            del self.cached[length:]  # first: an interrupt in between must not leave tokens that are not cached
            self.context.memory.truncate(length)

    def close(self) -> None:
        """Free the context; the model belongs to the weights. Calling it again does nothing."""
        self.context.close()


@functools.lru_cache(maxsize=64)
def _last_of(n: int) -> npt.NDArray[np.int8]:
    """Return flags that ask for the last of n tokens' row only."""
    flags = np.zeros(n, np.int8)
    flags[-1] = 1
    return flags
