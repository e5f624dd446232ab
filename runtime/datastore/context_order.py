"""Orders all positions of a text by the tokens before them: a suffix array of the text read backwards.

Read backwards, "the longest suffix of the context" becomes a longest common prefix, and the positions with the
longest ones lie next to each other: one binary search finds them. Contexts are compared up to DEPTH tokens.

REST (He et al. 2023) builds suffix arrays with libdivsufsort in several parts. Here numpy sorts bucket by bucket:
positions are split by their last few tokens into buckets of a bounded size, each of which is sorted in memory and
written behind the one before. So the memory needed does not depend on the size of the text, the result is one
array, and no compiled library is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["DEPTH", "TokenArray", "first_keys", "key_width", "order_by_context"]

DEPTH = 16
"""How many tokens before a position decide its place; the array of tokens begins with so many separators."""

_BUCKET = 2_000_000  # positions sorted at once: about 200 MB
_CHUNK = 2_000_000  # positions looked at in one step
_SAMPLED = 65_536  # keys that decide where buckets end
_LARGEST_BUCKET = 4 * _BUCKET

TokenArray = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]


def key_width(n_words: int) -> tuple[int, int]:
    """Return the bits of a token, with room for the separator, and how many tokens fit into one key."""
    bits = max(1, n_words.bit_length())
    return bits, max(1, 63 // bits)


def first_keys(tokens: TokenArray, start: int, stop: int, n_words: int) -> Keys:
    """Return the keys of the positions start..stop: their last few tokens, the nearest first, as one number."""
    bits, per_key = key_width(n_words)
    keys = np.zeros(stop - start, np.int64)
    for back in range(1, min(per_key, DEPTH) + 1):
        keys <<= bits
        keys |= tokens[start - back : stop - back]
    return keys


def order_by_context(
    tokens: TokenArray, n_words: int, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Positions]:
    """Yield all positions in order of their contexts, part by part.

    `tokens` int32 [n] begins with DEPTH separators (the token `n_words`) and ends with one; they also stand
    between texts. Positions of separators and those right behind one are left out. Of positions with the very
    same last tokens, at most the last 8 million are kept: more say nothing new. `progress` is told how many
    positions are done.
    """
    done = 0
    for low, high in _buckets(tokens, n_words):
        positions = _positions(tokens, n_words, low, high)[-_LARGEST_BUCKET:]
        if len(positions):
            done += len(positions)
            yield positions[np.lexsort(_keys(tokens, positions, n_words)[::-1])]
            progress(done)


def _buckets(tokens: TokenArray, n_words: int) -> list[tuple[int, int]]:
    """Return ranges of first keys that hold about `_BUCKET` positions each."""
    n = len(tokens)
    stride = max(1, n // _SAMPLED)
    sampled = [
        first_keys(tokens, start, min(start + _CHUNK, n), n_words)[::stride].copy() for start in range(DEPTH, n, _CHUNK)
    ]
    keys = np.sort(np.concatenate(sampled))
    count = -(-n // _BUCKET)
    inner = np.unique(keys[[len(keys) * i // count for i in range(1, count)]]).tolist()
    bounds = [0, *inner, 2**63 - 1]
    return list(itertools.pairwise(bounds))


def _positions(tokens: TokenArray, n_words: int, low: int, high: int) -> Positions:
    """Return the positions whose first keys lie in a bucket, ascending."""
    parts = []
    for start in range(DEPTH, len(tokens), _CHUNK):
        stop = min(start + _CHUNK, len(tokens))
        keys = first_keys(tokens, start, stop, n_words)
        wanted = (keys >= low) & (keys < high)
        wanted &= (tokens[start:stop] != n_words) & (tokens[start - 1 : stop - 1] != n_words)
        parts.append(np.flatnonzero(wanted) + start)
    return np.concatenate(parts)


def _keys(tokens: TokenArray, positions: Positions, n_words: int) -> list[Keys]:
    """Return the keys of all DEPTH tokens before some positions, the nearest tokens first."""
    bits, per_key = key_width(n_words)
    columns = []
    for first in range(1, DEPTH + 1, per_key):
        keys = np.zeros(len(positions), np.int64)
        for back in range(first, min(first + per_key, DEPTH + 1)):
            keys <<= bits
            keys |= tokens[positions - back]
        columns.append(keys)
    return columns
