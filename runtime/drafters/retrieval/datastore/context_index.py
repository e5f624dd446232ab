"""A suffix array of a text read backwards: positions ordered by the tokens before them, searched.

Read backwards, "the longest suffix of the context" becomes a longest common prefix, and the
positions with the longest ones lie next to each other: one binary search finds them, and the best
matches are its neighbours. Contexts are compared up to DEPTH tokens. The tokens nearest to a
position are packed into one number, its first key, which sorts as they do.

REST (He et al. 2023) builds suffix arrays with libdivsufsort in several parts. Here numpy sorts
bucket by bucket: positions are split by their last few tokens into buckets of a bounded size, each
of which is sorted in memory and written behind the one before. So the memory needed does not depend
on the size of the text, the result is one array, and no compiled library is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

DEPTH = 16
"""How many tokens before a position decide its place; so many separators begin the tokens."""

_BUCKET = 2_000_000  # positions sorted at once: about 200 MB
_CHUNK = 2_000_000  # positions looked at in one step
_SAMPLED = 65_536  # keys that decide where buckets end
_LARGEST_BUCKET = 4 * _BUCKET

TokenArray = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]


def key_width(vocab_size: int) -> tuple[int, int]:
    """Return the bits of a token, the separator included, and how many tokens fit into one key."""
    # The separator is the token vocab_size; 63 bits, because keys are signed int64.
    bits = max(1, vocab_size.bit_length())
    return bits, max(1, 63 // bits)


def first_keys(tokens: TokenArray, start: int, stop: int, vocab_size: int) -> Keys:
    """Return the first keys of the positions start..stop."""
    bits, per_key = key_width(vocab_size)
    keys = np.zeros(stop - start, np.int64)
    # The token nearest to the position takes the highest bits: keys sort as contexts do.
    for back in range(1, min(per_key, DEPTH) + 1):
        keys <<= bits
        keys |= tokens[start - back : stop - back]
    return keys


def _packed(
    tokens: TokenArray, positions: Positions, vocab_size: int, first: int, last: int
) -> Keys:
    """Return the tokens from `first` to `last` places before each position as one number."""
    bits, _ = key_width(vocab_size)
    keys = np.zeros(len(positions), np.int64)
    for back in range(first, last + 1):
        keys <<= bits
        keys |= tokens[positions - back]
    return keys


def sample_keys(
    tokens: TokenArray, positions: npt.NDArray[np.uint32], vocab_size: int
) -> npt.NDArray[np.int64]:
    """Return the first keys of some positions, int64."""
    _, per_key = key_width(vocab_size)
    return _packed(tokens, positions.astype(np.int64), vocab_size, 1, min(per_key, DEPTH))


def order_by_context(
    tokens: TokenArray, vocab_size: int, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Positions]:
    """Yield all positions in order of their contexts, part by part.

    `tokens` int32 [n] begins with DEPTH separators (the token `vocab_size`) and ends with one; they
    also stand between texts. Positions of separators and those right behind one are left out. Of
    positions with the very same last tokens, at most the last 8 million are kept: more say nothing
    new. `progress` is told how many positions are done.
    """
    done = 0
    for low, high in _buckets(tokens, vocab_size):
        # Of equal first keys, which one bucket must hold, the
        # last positions are kept to bound memory.
        positions = _positions(tokens, vocab_size, low, high)[-_LARGEST_BUCKET:]
        if len(positions):
            done += len(positions)
            # lexsort sorts by its last key first, so the nearest tokens go last.
            yield positions[np.lexsort(_keys(tokens, positions, vocab_size)[::-1])]
            progress(done)


def _buckets(tokens: TokenArray, vocab_size: int) -> list[tuple[int, int]]:
    """Return ranges of first keys that hold about `_BUCKET` positions each."""
    n = len(tokens)
    stride = max(1, n // _SAMPLED)
    sampled = [
        first_keys(tokens, start, min(start + _CHUNK, n), vocab_size)[::stride].copy()
        for start in range(DEPTH, n, _CHUNK)
    ]
    # Bounds are quantiles of a sample: exact ones would need all keys in memory.
    keys = np.sort(np.concatenate(sampled))
    count = -(-n // _BUCKET)
    # unique: a frequent context would make equal bounds, and with them empty buckets.
    inner = np.unique(keys[[len(keys) * i // count for i in range(1, count)]]).tolist()
    bounds = [0, *inner, 2**63 - 1]
    return list(itertools.pairwise(bounds))


def _positions(tokens: TokenArray, vocab_size: int, low: int, high: int) -> Positions:
    """Return the positions whose first keys lie in a bucket, ascending."""
    parts = []
    for start in range(DEPTH, len(tokens), _CHUNK):
        stop = min(start + _CHUNK, len(tokens))
        keys = first_keys(tokens, start, stop, vocab_size)
        wanted = (keys >= low) & (keys < high)
        # A separator is nobody's continuation, and right behind one there is no context to find.
        wanted &= (tokens[start:stop] != vocab_size) & (tokens[start - 1 : stop - 1] != vocab_size)
        parts.append(np.flatnonzero(wanted) + start)
    return np.concatenate(parts)


def _keys(tokens: TokenArray, positions: Positions, vocab_size: int) -> list[Keys]:
    """Return the keys of all DEPTH tokens before some positions, the nearest tokens first."""
    _, per_key = key_width(vocab_size)
    return [
        _packed(tokens, positions, vocab_size, first, min(first + per_key - 1, DEPTH))
        for first in range(1, DEPTH + 1, per_key)
    ]


SAMPLE_EVERY = 64
"""Every so many positions, the first key is kept apart: a small table narrows the search down."""

_BACK = np.arange(1, DEPTH + 1)


class ContextIndex:
    """A text's tokens with its positions ordered by context; the arrays may be mapped files.

    `tokens` int32 [n] (see `order_by_context`), `order` uint32 [m], `samples` int64
    [ceil(m / SAMPLE_EVERY)], `vocab_size` the size of the vocabulary, which is also the separator's
    number.
    """

    def __init__(
        self,
        tokens: TokenArray,
        order: npt.NDArray[np.uint32],
        samples: npt.NDArray[np.int64],
        vocab_size: int,
    ) -> None:
        # Plain views: slices of np.memmap cost ten times as much.
        self._tokens = np.asarray(tokens).view(np.ndarray)
        self._order = np.asarray(order).view(np.ndarray)
        self._samples = np.asarray(samples).view(np.ndarray)
        self.vocab_size = vocab_size
        self._bits, per_key = key_width(vocab_size)
        self._per_key = min(per_key, DEPTH)

    @staticmethod
    def of_text(tokens: Sequence[int], vocab_size: int) -> ContextIndex:
        """Return the index of a text that fits into memory."""
        framed = np.full(len(tokens) + DEPTH + 1, vocab_size, np.int32)
        framed[DEPTH:-1] = tokens
        parts = list(order_by_context(framed, vocab_size))
        order = np.concatenate(parts).astype(np.uint32) if parts else np.zeros(0, np.uint32)
        samples = sample_keys(framed, order[::SAMPLE_EVERY], vocab_size)
        return ContextIndex(framed, order, samples, vocab_size)

    def __len__(self) -> int:
        return len(self._order)

    def excerpt(self, share: float, length: int) -> list[int]:
        """Return up to `length` tokens, no separators, from a place, 0 <= `share` < 1."""
        start = DEPTH + int(share * max(1, len(self._tokens) - DEPTH - length))
        tokens: list[int] = self._tokens[start : start + length].tolist()
        return [token for token in tokens if 0 <= token < self.vocab_size]

    def nearest(
        self, context: Sequence[int], count: int, length: int, min_match: int
    ) -> list[tuple[int, list[int]]]:
        """Return up to `count` places of the longest matches, each match's length and what follows.

        Matches of fewer than `min_match` tokens are left out, and counted up to DEPTH. What follows
        has up to `length` tokens and ends with its text. Where more than `count` places match
        equally long, those whose older contexts are nearest are taken.
        """
        if not len(self._order) or not context:
            return []
        query = [*reversed(context[-DEPTH:])]
        # A context shorter than DEPTH is read as the beginning of a text, where separators stand.
        query += [self.vocab_size] * (DEPTH - len(query))
        place = self._search(query)
        # The longest matches are neighbours of where the query
        # belongs: count on either side suffices.
        around = self._order[max(0, place - count) : place + count].astype(np.int64)
        # clip: a damaged file may name positions outside; what
        # it then finds does not match or is cut.
        before = np.take(self._tokens, around[:, None] - _BACK, mode="clip")
        equal = before == np.array(query, np.int32)
        # argmin: the first token that differs.
        matched = np.where(equal.all(axis=1), DEPTH, equal.argmin(axis=1))
        # Separators of a short query match those before a text, and are no tokens of the context.
        matched = np.minimum(matched, len(context))
        # Stable: among equal matches the neighbours' order stays.
        best = np.argsort(-matched, kind="stable")[:count]
        best = best[matched[best] >= min_match]
        follows = around[best][:, None] + np.arange(length)
        rows = np.take(self._tokens, follows, mode="clip").tolist()
        matches = zip(matched[best].tolist(), rows, strict=True)
        return [(match, self._until_end(row)) for match, row in matches]

    def _until_end(self, row: list[int]) -> list[int]:
        # Separators end a text; a damaged file must not feed the target unknown tokens.
        if max(row) < self.vocab_size and min(row) >= 0:
            return row
        return row[: next(i for i, token in enumerate(row) if not 0 <= token < self.vocab_size)]

    def _search(self, query: list[int]) -> int:
        """Return where the query belongs in the order."""
        key = 0
        for token in query[: self._per_key]:
            key = key << self._bits | token
        # Samples are every SAMPLE_EVERY-th first key; the place
        # lies between the two around the key.
        first = int(np.searchsorted(self._samples, key, "left"))
        last = int(np.searchsorted(self._samples, key, "right"))
        low, high = max(0, first - 1) * SAMPLE_EVERY, min(last * SAMPLE_EVERY, len(self._order))
        tokens, order = self._tokens, self._order
        while low < high:
            middle = (low + high) // 2
            position = int(order[middle])
            # Whole contexts are compared: first keys hold only the nearest tokens.
            if tokens[position - DEPTH : position][::-1].tolist() < query:
                low = middle + 1
            else:
                high = middle
        return low
