"""Lookahead decoding with plain lists: the reference for the drafter's faster pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Greedy = Callable[[Sequence[int]], int]
"""The target's greedy token after a text."""


class PlainPool:
    """The same pool as lists that are searched from end to end."""

    def __init__(self, per_key: int, max_keys: int) -> None:
        self.per_key, self.max_keys = per_key, max_keys
        self.used: list[tuple[int, ...]] = []

    def add(self, ngram: tuple[int, ...]) -> None:
        self.used = [earlier for earlier in self.used if earlier != ngram] + [ngram]
        own = [earlier for earlier in self.used if earlier[0] == ngram[0]]
        if len(own) > self.per_key:
            self.used.remove(own[0])
        last_use = {earlier[0]: index for index, earlier in enumerate(self.used)}
        if len(last_use) > self.max_keys:
            oldest = min(last_use, key=lambda first: last_use[first])
            self.used = [earlier for earlier in self.used if earlier[0] != oldest]

    def guesses(self, first: int) -> list[tuple[int, ...]]:
        return [ngram[1:] for ngram in reversed(self.used) if ngram[0] == first]


class PlainLookahead:
    """The paper's window, its tokens kept by row and absolute position.

    The token of row r in column c stands c + r after the root, whatever round it is in. When a
    round keeps more than one token, all of the window moves on with the root.
    """

    def __init__(
        self, greedy: Greedy, width: int, n: int, prompt: Sequence[int], first_row: Sequence[int]
    ) -> None:
        assert len(first_row) == width + n - 3
        self.greedy, self.n = greedy, n
        self.columns = width + n - 2
        root = len(prompt) - 1
        self.rows = [{root + 1 + i: token for i, token in enumerate(first_row)}]

    def context(self, text: Sequence[int], column: int) -> list[int]:
        """What the last row of a column sees: the text, row 0 up to the column, then the column's
        other rows."""
        root = len(text) - 1
        seen = list(text) + [self.rows[0][root + i] for i in range(1, column + 1)]
        for number, row in enumerate(self.rows[1:], 1):
            seen.append(row[root + column + number])
        return seen

    def step(self, text: Sequence[int], n_new: int) -> list[tuple[int, ...]]:
        """Evaluate the window after `text`, to which the round adds `n_new` tokens; return its
        n-grams by column."""
        root, n_rows = len(text) - 1, len(self.rows)
        contexts = [self.context(text, column) for column in range(self.columns)]
        outputs = [self.greedy(context) for context in contexts]
        new_row = {root + column + n_rows: output for column, output in enumerate(outputs)}
        ngrams: list[tuple[int, ...]] = []
        if n_rows == self.n - 1:
            ngrams = [
                (*context[-n_rows:], output)
                for context, output in zip(contexts, outputs, strict=True)
            ]
            self.rows.pop(0)
        else:
            self.columns -= 1
        self.rows = [
            {place + n_new - 1: token for place, token in row.items()}
            for row in [*self.rows, new_row]
        ]
        return ngrams
