"""Chunks of a long text, retrieved by what the target's own states say (after TriForce, section 4).

TriForce (Sun et al. 2024) keeps the chunks whose mean key the last query meets best. llama.cpp
tells neither queries nor keys, but the inputs of a layer at every token; their likeness stands in
for that: a chunk's mean and the mean of the last tokens, less the mean of all, by the cosine. The
states are kept in a random projection to a few numbers, which keeps angles (Johnson and
Lindenstrauss 1984), so that a long text takes kilobytes a thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.runtime.drafter import RoundOutcome
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.text import common_prefix

_WIDTH = 64  # numbers that are kept of a state


class ChunkMemory:
    """The states of one text, and which `count` of its chunks of `size` tokens are most alike.

    `layer` is the layer of the target whose inputs are read, [n_embd] each. Learning a position
    again replaces what was known of it.
    """

    def __init__(self, size: int, count: int, *, layer: int, n_embd: int, n_ctx: int) -> None:
        self._size, self._count, self._layer = size, count, layer
        generator = np.random.default_rng(0)  # all conversations alike, so that runs repeat
        self._projection = generator.standard_normal((n_embd, _WIDTH), np.float32)
        self._states = np.zeros((n_ctx, _WIDTH), np.float32)
        self._known = np.zeros(n_ctx, np.bool_)
        self._text: list[int] = []

    @property
    def most_kept(self) -> int:
        """The most tokens that are chosen."""
        return self._size * self._count

    def begin(self, tokens: Sequence[int]) -> None:
        """Turn to another text; what it shares with the one before stays known."""
        shared = common_prefix(self._text, tokens)
        self._known[shared:] = False
        self._text = list(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the states of `count` tokens of a prompt, the first at position `start`."""
        for row in range(count):
            self._learn(start + row, rows, row)

    def learn_round(self, outcome: RoundOutcome) -> None:
        """Learn the states of a round's root and accepted nodes."""
        for place, row in enumerate(outcome.path_rows, outcome.start - 1):
            self._learn(place, outcome.rows, row)
        self._text += outcome.tokens[len(self._text) :]

    def _learn(self, position: int, rows: EvaluatedRows, row: int) -> None:
        if 0 <= position < len(self._known):
            self._states[position] = rows.layer_input(row, self._layer) @ self._projection
            self._known[position] = True

    def choose(self, start: int, end: int, now: int) -> Sequence[int]:
        """Return the positions of the chunks to keep of positions start <= p < end, ascending.

        They are compared with the last tokens before `now`; what is known of later ones is not
        read, so that the same text has the same chunks, whatever was said after it before.
        """
        n_chunks = (end - start) // self._size
        known = self._known[:now].nonzero()[0]
        if n_chunks < 1 or not len(known):
            return []
        states = self._states
        query = states[known[-self._size :]].mean(axis=0) - states[known].mean(axis=0)
        shape = (n_chunks, self._size)
        inside = self._known[start : start + n_chunks * self._size].reshape(shape)
        own = states[start : start + n_chunks * self._size].reshape(*shape, _WIDTH)
        counts = inside.sum(axis=1)
        means = (own * inside[:, :, None]).sum(axis=1) / np.maximum(counts, 1)[:, None]
        means -= states[known].mean(axis=0)
        lengths = np.linalg.norm(means, axis=1)
        scores = np.where(counts > 0, means @ query / np.maximum(lengths, 1e-12), -np.inf)
        best = np.argsort(-scores, kind="stable")[: self._count]
        starts = start + self._size * np.sort(best[counts[best] > 0])
        return (starts[:, None] + np.arange(self._size)).ravel().tolist()
