"""What an EAGLE head knows of one conversation: real pairs of its text, and below them a round's
draft nodes.

A real pair joins the target's features at a position (its hidden state, or inputs of its layers)
with the token after it. After each round the accepted positions get real pairs in the place of the
predicted ones that drafted them, as in the references. They wait until the head is asked to draft:
a chain's graph evaluates them with the draft.

The draft nodes of a round that an EAGLE head has evaluated: what was predicted at each, and what
each sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.eagle.pair_head import EagleRows
from specrun.runtime.heads import MOST_CHAIN_ROWS, ChainTokens, RowPiece, TextRows

FloatRows = npt.NDArray[np.float32]
_NODES = 32  # for which there is room at first


class DraftNodes:
    """The draft nodes of a round: the states predicted at them, and which nodes each sees, itself
    among them.

    Row 0 stands for the last token of the text, so node i is row i + 1, and ROOT row 0.
    """

    def __init__(self, root: FloatRows) -> None:
        self._n = 0
        self._states = np.zeros((_NODES + 1, len(root)), root.dtype)
        self._states[0] = root
        self._sees = np.zeros((_NODES + 1, _NODES), np.bool_)

    def __len__(self) -> int:
        return self._n

    def add(self, parents: Sequence[int]) -> tuple[FloatRows, npt.NDArray[np.bool_]]:
        """Add nodes below others; return the states they read [n, hidden] and the nodes they see
        [n, nodes]."""
        first, n = self._n, len(parents)
        end = first + n
        if end > self._sees.shape[1]:
            more = max(end, 2 * self._sees.shape[1])
            self._states = np.pad(self._states, ((0, more + 1 - len(self._states)), (0, 0)))
            self._sees = np.pad(
                self._sees, ((0, more + 1 - len(self._sees)), (0, more - self._sees.shape[1]))
            )
        rows = np.array(parents) + 1
        self._sees[first + 1 : end + 1] = self._sees[rows]
        own = np.arange(first, end)
        self._sees[own + 1, own] = True
        self._n = end
        return self._states[rows], self._sees[first + 1 : end + 1, :end]

    def predicted(self, states: FloatRows) -> None:
        """Note the states predicted at the nodes that were added last."""
        self._states[self._n + 1 - len(states) : self._n + 1] = states


class EvaluatesPairs(Protocol):
    """What evaluates pairs; the cells of an EAGLE head do (`heads.pair_head.PairCells`)."""

    n_cells: int

    def evaluate(
        self,
        tokens: Sequence[int],
        states: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
    ) -> EagleRows:
        """Evaluate pairs of tokens and states that were predicted; see `PairCells.evaluate`."""

    def evaluate_features(
        self,
        tokens: Sequence[int],
        features: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
    ) -> EagleRows:
        """Evaluate pairs of tokens and the target's features; see `PairCells.evaluate_features`."""

    def chain(
        self,
        tokens: Sequence[int],
        features: FloatRows,
        position: int,
        count: int,
        n: int,
        *,
        probabilities: bool = False,
    ) -> ChainTokens | None:
        """Evaluate real pairs and a greedy chain below them, or return None; see
        `PairCells.chain`."""


class EagleState:
    """The pairs of a text are `TextRows` of the target's features; a round's nodes lie in the cells
    after them.

    Nodes are numbered from 0 in the order of their evaluation.
    """

    def __init__(self, cells: EvaluatesPairs) -> None:
        self._cells = cells
        self._rows = TextRows(self._evaluate, cells.n_cells, ahead=1)
        self._root: EagleRows | None = None
        self._nodes: DraftNodes | None = None

    @property
    def base(self) -> int:
        """The position of the first pair: those before it were given up."""
        return self._rows.base

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the pairs that hold for a text."""
        self._rows.begin(tokens)

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self._rows.cut(length)

    def learn(self, start: int, features: FloatRows, tokens: Sequence[int]) -> None:
        """Take the target's features [n, features] of positions `start` on; see
        `TextRows.learn`."""
        self._rows.learn(start, features, tokens)

    def root(self, tokens: Sequence[int]) -> EagleRows | None:
        """Forget all nodes and return the row after the last token, None where its pair is not
        known."""
        self._nodes = None
        self._root = self._rows.said(tokens)
        return self._root

    def chain(self, tokens: Sequence[int], n: int) -> ChainTokens | None:
        """Forget all nodes and return up to n tokens of a greedy chain after the last one,
        evaluated at once.

        None where the last pair is not known, or the head has no graph for it.
        """
        self._nodes = self._root = None
        piece = self._rows.due(tokens, MOST_CHAIN_ROWS)
        n = min(n, 1 + self._rows.room)
        if piece is None or n < 1:
            return None
        drafted = self._cells.chain(piece.tokens, piece.rows, piece.position, piece.count, n)
        if drafted is not None:
            self._rows.settle(piece)
        return drafted

    def room(self) -> int:
        """Return how many nodes may still be evaluated."""
        return self._rows.room - (0 if self._nodes is None else len(self._nodes))

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> EagleRows:
        """Evaluate a depth of the tree: token i below node `parents[i]`, or below the last token
        (ROOT)."""
        assert self._root is not None
        if self._nodes is None:
            self._nodes = DraftNodes(self._root.states[0])
        nodes, count, n = self._nodes, self._rows.count, len(tokens)
        first = count + len(nodes)
        states, above = nodes.add(parents)
        sees = np.empty((n, first + n), np.bool_)
        sees[:, :count] = True
        sees[:, count:] = above
        position = self._rows.base + count + int(above[0].sum()) - 1
        rows = self._cells.evaluate(
            tokens,
            states,
            np.full(n, position, np.int32),
            np.arange(first, first + n, dtype=np.int64),
            sees,
        )
        nodes.predicted(rows.states)
        return rows

    def _evaluate(self, piece: RowPiece) -> EagleRows:
        """Put real pairs into cells, each seeing all before it; return the row after the last
        one."""
        n, count = len(piece), piece.count
        steps = np.arange(n)
        positions, cells = (
            (steps + piece.position).astype(np.int32),
            (steps + count).astype(np.int64),
        )
        sees = np.tri(n, count + n, count, dtype=np.bool_)
        rows = self._cells.evaluate_features(piece.tokens, piece.rows, positions, cells, sees)
        last = slice(n - 1, n)
        logits = None if rows.logits is None else rows.logits[last].copy()
        return EagleRows(rows.states[last], rows.tokens[last], rows.log_probs[last], logits)
