"""What an EAGLE head has cached: real pairs of the committed text, and below them a round's draft nodes.

A real pair joins the target's features at a position (its hidden state, or inputs of its layers) with the token after
it. After each round the accepted positions get real pairs in the place of the predicted ones that drafted them, as in
the references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.heads.pair_head import EagleRows
from specrun.runtime.prefix import common_prefix
from specrun.runtime.tree import ROOT

__all__ = ["EagleState", "EvaluatesPairs"]

_CHUNK = 64

FloatRows = npt.NDArray[np.float32]


class EvaluatesPairs(Protocol):
    """What evaluates pairs; every `heads.pair_head.PairHead` does."""

    n_cells: int

    def evaluate(
        self,
        tokens: Sequence[int],
        states: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
    ) -> EagleRows:
        """Evaluate pairs of tokens and states that were predicted; see `PairHead.evaluate`."""

    def evaluate_features(
        self,
        tokens: Sequence[int],
        features: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
    ) -> EagleRows:
        """Evaluate pairs of tokens and the target's features; see `PairHead.evaluate_features`."""


class EagleState:
    """Real pairs of positions `base` to `base + count - 1` lie in cells 0 to `count - 1`, nodes after them.

    Nodes are numbered from 0 in the order of their evaluation.
    """

    def __init__(self, head: EvaluatesPairs) -> None:
        self._head = head
        self._text: list[int] = []  # the tokens up to the last pair's own
        self._base = 0
        self._count = 0
        self._root: EagleRows | None = None
        self._states: list[FloatRows] = []
        self._ancestors: list[list[int]] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the pairs that hold for a text; the pair of position j knows the tokens up to j + 1."""
        self._text = self._text[: common_prefix(self._text, tokens)]
        self._count = max(0, min(self._count, len(self._text) - 1 - self._base))
        self._root = None

    @property
    def length(self) -> int:
        """How many tokens the pairs know: the next pair joins position `length - 1` with token `length`."""
        return self._base + self._count + 1

    def learn(self, start: int, features: FloatRows, tokens: Sequence[int]) -> None:
        """Make pairs of the target's features [n, features] of positions `start` on and the tokens after them.

        `tokens` is the whole text, at least one longer than the last position. Pairs that are known already stay. Where
        features are missing between the known ones and these, the earlier pairs are given up: the head then sees less of
        the text, which costs acceptance and nothing else.
        """
        known = self._base + self._count
        if start > known or start < self._base:
            self._base, self._count = start, 0
        elif start < known:
            features = features[known - start :]
        for first in range(0, len(features), _CHUNK):
            self._add(features[first : first + _CHUNK], tokens)

    def _add(self, features: FloatRows, tokens: Sequence[int]) -> None:
        n = min(len(features), self._head.n_cells - self._count)
        if n < 1:
            return
        begin = self._base + self._count
        cells = np.arange(self._count, self._count + n)
        sees = np.tri(n, self._count + n, self._count, dtype=np.bool_)
        following = tokens[begin + 1 : begin + 1 + n]
        rows = self._head.evaluate_features(
            following, features[:n], (cells + self._base).astype(np.int32), cells.astype(np.int64), sees
        )
        last = slice(n - 1, n)
        logits = None if rows.logits is None else rows.logits[last]
        self._root = EagleRows(rows.states[last], rows.words[last], rows.log_probs[last], logits)
        self._count += n
        self._text[begin:] = tokens[begin : begin + 1 + n]

    def root(self, tokens: Sequence[int]) -> EagleRows | None:
        """Forget all nodes and return the row after the last token, None where its pair is not known."""
        self._states, self._ancestors = [], []
        return self._root if self.length == len(tokens) and self._text[-1:] == list(tokens[-1:]) else None

    def room(self) -> int:
        """Return how many nodes may still be evaluated."""
        return self._head.n_cells - self._count - len(self._states)

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> EagleRows:
        """Evaluate a depth of the tree: token i below node `parents[i]`, or below the last token (ROOT)."""
        assert self._root is not None
        first = self._count + len(self._states)
        n = len(tokens)
        states = np.stack([self._root.states[0] if parent == ROOT else self._states[parent] for parent in parents])
        sees = np.zeros((n, first + n), np.bool_)
        sees[:, : self._count] = True
        depth = 0
        for row, parent in enumerate(parents):
            above = [] if parent == ROOT else self._ancestors[parent]
            own = [*above, first + row]
            sees[row, own] = True
            self._ancestors.append(own)
            depth = len(above)
        position = self._base + self._count + depth
        rows = self._head.evaluate(
            tokens, states, np.full(n, position, np.int32), np.arange(first, first + n, dtype=np.int64), sees
        )
        self._states.extend(rows.states)
        return rows
