"""Looks up contexts among ordered positions: one binary search, then the neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.runtime.datastore.context_order import DEPTH, TokenArray, key_width, order_by_context

__all__ = ["SAMPLE_EVERY", "ContextIndex", "sample_keys"]

SAMPLE_EVERY = 64
"""Every so many positions, the first key is kept apart: a small table that narrows the search down."""

_BACK = np.arange(1, DEPTH + 1)


class ContextIndex:
    """A text's tokens with its positions ordered by context; the arrays may be mapped files.

    `tokens` int32 [n] (see `order_by_context`), `order` uint32 [m], `samples` int64 [ceil(m / SAMPLE_EVERY)],
    `n_words` the size of the vocabulary, which is also the separator's number.
    """

    def __init__(
        self, tokens: TokenArray, order: npt.NDArray[np.uint32], samples: npt.NDArray[np.int64], n_words: int
    ) -> None:
        # Plain views: slices of np.memmap cost ten times as much.
        self._tokens = np.asarray(tokens).view(np.ndarray)
        self._order = np.asarray(order).view(np.ndarray)
        self._samples = np.asarray(samples).view(np.ndarray)
        self.n_words = n_words
        self._bits, per_key = key_width(n_words)
        self._per_key = min(per_key, DEPTH)

    @staticmethod
    def of_text(tokens: Sequence[int], n_words: int) -> ContextIndex:
        """Return the index of a text that fits into memory."""
        framed = np.full(len(tokens) + DEPTH + 1, n_words, np.int32)
        framed[DEPTH:-1] = tokens
        parts = list(order_by_context(framed, n_words))
        order = np.concatenate(parts).astype(np.uint32) if parts else np.zeros(0, np.uint32)
        return ContextIndex(framed, order, sample_keys(framed, order[::SAMPLE_EVERY], n_words), n_words)

    def __len__(self) -> int:
        return len(self._order)

    def excerpt(self, share: float, length: int) -> list[int]:
        """Return up to `length` tokens from a place in the text, 0 <= `share` < 1, without separators."""
        start = DEPTH + int(share * max(1, len(self._tokens) - DEPTH - length))
        return [one for one in self._tokens[start : start + length].tolist() if 0 <= one < self.n_words]

    def nearest(self, context: Sequence[int], count: int, length: int, min_match: int) -> list[tuple[int, list[int]]]:
        """Return up to `count` places with the longest matches: the matched tokens and what follows, longest first.

        Matches of fewer than `min_match` tokens are left out, and counted up to DEPTH. What follows has up to
        `length` tokens and ends with its text. Where more than `count` places match equally long, those whose
        older contexts are nearest are taken.
        """
        if not len(self._order) or not context:
            return []
        query = [*reversed(context[-DEPTH:])]
        query += [self.n_words] * (DEPTH - len(query))
        place = self._search(query)
        around = self._order[max(0, place - count) : place + count].astype(np.int64)
        equal = np.take(self._tokens, around[:, None] - _BACK, mode="clip") == np.array(query, np.int32)
        matched = np.where(equal.all(axis=1), DEPTH, equal.argmin(axis=1))
        matched = np.minimum(matched, len(context))
        best = np.argsort(-matched, kind="stable")[:count]
        best = best[matched[best] >= min_match]
        rows = np.take(self._tokens, around[best][:, None] + np.arange(length), mode="clip").tolist()
        return [(match, self._until_end(row)) for match, row in zip(matched[best].tolist(), rows, strict=True)]

    def _until_end(self, row: list[int]) -> list[int]:
        if max(row) < self.n_words and min(row) >= 0:  # a damaged file must not feed the target unknown words
            return row
        return row[: next(i for i, token in enumerate(row) if not 0 <= token < self.n_words)]

    def _search(self, query: list[int]) -> int:
        """Return where the query belongs in the order."""
        key = 0
        for token in query[: self._per_key]:
            key = key << self._bits | token
        low = max(0, int(np.searchsorted(self._samples, key, "left")) - 1) * SAMPLE_EVERY
        high = min(int(np.searchsorted(self._samples, key, "right")) * SAMPLE_EVERY, len(self._order))
        tokens, order = self._tokens, self._order
        while low < high:
            middle = (low + high) // 2
            position = int(order[middle])
            if tokens[position - DEPTH : position][::-1].tolist() < query:
                low = middle + 1
            else:
                high = middle
        return low


def sample_keys(tokens: TokenArray, positions: npt.NDArray[np.uint32], n_words: int) -> npt.NDArray[np.int64]:
    """Return the first keys of some positions, int64."""
    bits, per_key = key_width(n_words)
    keys = np.zeros(len(positions), np.int64)
    places = positions.astype(np.int64)
    for back in range(1, min(per_key, DEPTH) + 1):
        keys <<= bits
        keys |= tokens[places - back]
    return keys
