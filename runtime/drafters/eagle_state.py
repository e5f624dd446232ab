"""What an EAGLE head has cached: real pairs of the committed text, and below them a round's draft nodes.

A real pair joins the target's features at a position (its hidden state, or inputs of its layers) with the token after
it. After each round the accepted positions get real pairs in the place of the predicted ones that drafted them, as in
the references. They wait until the head is asked to draft: a chain's graph evaluates them with the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.draft_nodes import DraftNodes
from specrun.runtime.drafters.pending_rows import PendingRows
from specrun.runtime.heads.chain_words import MOST_CHAIN_ROWS, ChainWords
from specrun.runtime.heads.pair_head import EagleRows
from specrun.runtime.prefix import common_prefix

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

    def chain(
        self,
        tokens: Sequence[int],
        features: FloatRows,
        position: int,
        count: int,
        n: int,
        *,
        probabilities: bool = False,
    ) -> ChainWords | None:
        """Evaluate real pairs and a greedy chain below them, or return None; see `PairHead.chain`."""


class EagleState:
    """Real pairs of positions `base` to `base + count - 1` lie in cells 0 to `count - 1`, nodes after them.

    Those of the positions after that are pending. Nodes are numbered from 0 in the order of their evaluation.
    """

    def __init__(self, head: EvaluatesPairs) -> None:
        self._head = head
        self._text: list[int] = []  # the tokens up to the last pair's own
        self._base = 0
        self._count = 0
        self._pending = PendingRows()
        self._last: FloatRows | None = None  # the features of the last pair that lies in a cell
        self._root: EagleRows | None = None
        self._nodes: DraftNodes | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the pairs that hold for a text, short of the last one; the pair of position j knows the tokens to j + 1.

        The last one's state is shown again: what follows from it is what the first draft begins with.
        """
        self._text = self._text[: max(0, min(common_prefix(self._text, tokens), len(tokens) - 1))]
        holds = max(0, len(self._text) - 1 - self._base)
        self._pending.keep(max(0, holds - self._count))
        self._count = min(self._count, holds)
        self._last = self._root = None

    @property
    def length(self) -> int:
        """How many tokens the pairs know: the next pair joins position `length - 1` with token `length`."""
        return self._base + self._count + len(self._pending) + 1

    def learn(self, start: int, features: FloatRows, tokens: Sequence[int]) -> None:
        """Take the target's features [n, features] of positions `start` on, for pairs with the tokens after them.

        `tokens` is the whole text, at least one longer than the last position. Pairs that are known already stay. Where
        features are missing between the known ones and these, the earlier pairs are given up: the head then sees less
        of the text, which costs acceptance and nothing else.
        """
        known = self.length - 1
        if not self._base <= start <= known or len(self._text) < known:
            self._base, self._count, known = start, 0, start
            self._pending.keep(0)
            self._text = list(tokens[:start])
        elif start < known:
            features = features[known - start :]
        n = min(len(features), self._head.n_cells - (known - self._base))
        if n < 1:
            return
        self._pending.add(features[:n])
        self._text[known:] = tokens[known : known + 1 + n]
        while len(self._pending) > _CHUNK:
            self._evaluate(_CHUNK)

    def _evaluate(self, n: int) -> None:
        """Put the first n pending pairs into cells."""
        begin, count = self._base + self._count, self._count
        features = self._pending.first(n)
        n = len(features)
        cells = np.arange(count, count + n)
        sees = np.tri(n, count + n, count, dtype=np.bool_)
        following = self._text[begin + 1 : begin + 1 + n]
        rows = self._head.evaluate_features(
            following, features, (cells + self._base).astype(np.int32), cells.astype(np.int64), sees
        )
        last = slice(n - 1, n)
        logits = None if rows.logits is None else rows.logits[last].copy()
        self._root = EagleRows(rows.states[last], rows.words[last], rows.log_probs[last], logits)
        self._last = features[last]
        self._pending.drop(n)
        self._count += n

    def root(self, tokens: Sequence[int]) -> EagleRows | None:
        """Forget all nodes and return the row after the last token, None where its pair is not known."""
        if not self._is_known(tokens):
            return None
        if self._root is None:
            self._return_last()
        while self._pending:
            self._evaluate(_CHUNK)
        return self._root

    def chain(self, tokens: Sequence[int], n: int) -> ChainWords | None:
        """Forget all nodes and return up to n words of a greedy chain after the last token, evaluated at once.

        None where the last pair is not known, or the head has no graph for it.
        """
        if not self._is_known(tokens):
            return None
        self._return_last()
        while len(self._pending) > MOST_CHAIN_ROWS:
            self._evaluate(min(_CHUNK, len(self._pending) - 1))
        waiting = len(self._pending)
        n = min(n, 1 + self.room())
        if not waiting or n < 1:
            return None
        position = self._base + self._count
        features = self._pending.first(waiting)
        words = self._head.chain(self._text[position + 1 : position + 1 + waiting], features, position, self._count, n)
        if words is None:
            return None
        self._pending.drop(waiting)
        self._count += waiting
        self._last, self._root = features[-1:], None
        return words

    def _is_known(self, tokens: Sequence[int]) -> bool:
        """Forget all nodes; return whether the pair with a text's last token is known."""
        self._nodes = None
        return self.length == len(tokens) and self._text[-1:] == list(tokens[-1:])

    def _return_last(self) -> None:
        """Have the last pair evaluated once more, where none is pending: what came of it is needed again."""
        if not self._pending and self._last is not None:
            self._pending.add(self._last)
            self._count -= 1
            self._last = None

    def room(self) -> int:
        """Return how many nodes may still be evaluated."""
        return self._head.n_cells - self._count - len(self._pending) - (0 if self._nodes is None else len(self._nodes))

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> EagleRows:
        """Evaluate a depth of the tree: token i below node `parents[i]`, or below the last token (ROOT)."""
        assert self._root is not None
        if self._nodes is None:
            self._nodes = DraftNodes(self._root.states[0])
        nodes, first, n = self._nodes, self._count + len(self._nodes), len(tokens)
        states, above = nodes.add(parents)
        sees = np.empty((n, first + n), np.bool_)
        sees[:, : self._count] = True
        sees[:, self._count :] = above
        position = self._base + self._count + int(above[0].sum()) - 1
        rows = self._head.evaluate(
            tokens, states, np.full(n, position, np.int32), np.arange(first, first + n, dtype=np.int64), sees
        )
        nodes.predicted(rows.states)
        return rows
