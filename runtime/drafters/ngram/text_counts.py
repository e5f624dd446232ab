"""N-gram counts: of a growing text, which can be cut back, and of texts that stay as they are.

`GrowingCounts` are hash tables, quick to change; `TextCounts` a trie in sorted arrays, which holds
millions of n-grams in some bytes each and is searched by bisection. Both say which tokens followed
a context, how often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.law import FloatArray, IdArray
from specrun.runtime.text import common_prefix

MAX_ORDER = 5
Followers = tuple[IdArray, FloatArray]
"""Tokens that followed a context, ascending, and how often each did."""

_NOTHING: Followers = (np.zeros(0, np.intp), np.zeros(0))


def check_order(order: int) -> None:
    """Raise OptionError for n-grams that are not counted."""
    if not 1 <= order <= MAX_ORDER:
        raise OptionError(f"order is {order}: n-grams of 1 to {MAX_ORDER} tokens are counted")


class TextCounts:
    """The n-grams of texts, of 1 to `order` tokens; none reaches from one text into the next.

    Level j of the trie has an entry for each different j-gram, sorted by the number of its first
    j - 1 tokens on the level above and then by its last token: so what followed a context is a
    stretch of a level, and a context is found by a bisection a token.
    """

    def __init__(self, texts: Sequence[Sequence[int]], order: int, vocab_size: int) -> None:
        check_order(order)
        self.order, self._size = order, vocab_size
        self._keys: list[npt.NDArray[np.int64]] = []
        self._counts: list[FloatArray] = []
        tokens = np.array([token for text in texts for token in text], np.int64)
        # How many tokens of its text come after each.
        left = np.concatenate([np.arange(len(text))[::-1] for text in texts] or [tokens])
        starts = np.arange(len(tokens))
        above = np.zeros(len(tokens), np.int64)
        for length in range(1, order + 1):
            inside = left[starts] >= length - 1
            starts, above = starts[inside], above[inside]
            # An entry's number and a token: two numbers in one, below 2^62 for any text in memory.
            packed = above * vocab_size + tokens[starts + length - 1]
            keys, places, counts = np.unique(packed, return_inverse=True, return_counts=True)
            self._keys.append(keys)
            self._counts.append(counts.astype(np.float64))
            above = places.astype(np.int64)
        self._all: Followers = self._keys[0].astype(np.intp), self._counts[0]

    def __len__(self) -> int:
        """Return how many different n-grams there are, of all lengths."""
        return sum(map(len, self._keys))

    def followers(self, context: Sequence[int]) -> Followers:
        """Return what followed a context of fewer than `order` tokens; the tokens for an empty."""
        if not context:
            return self._all
        entry = 0
        for level, token in enumerate(context):
            keys = self._keys[level]
            key = entry * self._size + token
            entry = int(keys.searchsorted(key))
            if entry == len(keys) or keys[entry] != key:
                return _NOTHING
        keys, counts = self._keys[len(context)], self._counts[len(context)]
        start, end = keys.searchsorted((entry * self._size, (entry + 1) * self._size))
        return (keys[start:end] - entry * self._size).astype(np.intp), counts[start:end]


class GrowingCounts:
    """The n-grams of one text of 1 to `order` tokens, which grows and is cut back at its end."""

    def __init__(self, order: int) -> None:
        check_order(order)
        self.order = order
        self.tokens: list[int] = []
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}
        # All tokens of the text, sorted: every law asks for them, and a round changes few.
        self._all: Followers | None = None
        # Set while tokens and counts change: an interrupt leaves it set, and all is counted anew.
        self._changing = False

    def begin(self, tokens: Sequence[int]) -> None:
        """Turn to another text; what it shares with the one before stays counted."""
        shared = common_prefix(self.tokens, tokens)
        if self._changing:
            self.tokens, self._followers, self._all, shared = [], {}, None, 0
        self.cut(shared)
        self.extend(tokens[shared:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Count the n-grams that end in these tokens, which go on the text."""
        text, table = self.tokens, self._followers
        self._changing = True
        for token in tokens:
            end = len(text)
            for length in range(min(self.order, end + 1)):
                found = table.setdefault(tuple(text[end - length :]), {})
                found[token] = found.get(token, 0) + 1
            text.append(token)
            self._note(token, 1.0)
        self._changing = False

    def cut(self, length: int) -> None:
        """Take back the tokens from `length` on, and the n-grams that end in them."""
        text, table = self.tokens, self._followers
        self._changing = True
        while len(text) > length:
            token = text.pop()
            end = len(text)
            for size in range(min(self.order, end + 1)):
                context = tuple(text[end - size :])
                found = table[context]
                if found[token] > 1:
                    found[token] -= 1
                elif len(found) > 1:
                    del found[token]
                else:
                    del table[context]
            self._note(token, -1.0)
        self._changing = False

    def followers(self, context: Sequence[int]) -> Followers:
        """Return what followed a context of fewer than `order` tokens; the tokens for an empty."""
        if not context:
            if self._all is None:
                self._all = _sorted(self._followers.get((), {}))
            return self._all
        return _sorted(self._followers.get(tuple(context), {}))

    def _note(self, token: int, change: float) -> None:
        """Change a token's own count; one that comes or goes changes the array of all."""
        if self._all is None:
            return
        ids, counts = self._all
        place = int(ids.searchsorted(token))
        if place < len(ids) and ids[place] == token and counts[place] + change > 0.0:
            counts[place] += change
        else:
            self._all = None


def _sorted(found: Mapping[int, int]) -> Followers:
    if not found:
        return _NOTHING
    tokens = sorted(found)
    return np.array(tokens, np.intp), np.array([found[token] for token in tokens], np.float64)
