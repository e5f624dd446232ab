"""EAGLE's state of one conversation: real pairs of its text, and below them a round's draft nodes.

A real pair joins the target's features at a position (its hidden state, or inputs of its layers)
with the token after it. Draft nodes are pairs, too, whose feature the head predicted itself. After
each round the accepted positions get real pairs in the place of the predicted ones that drafted
them, as in the references: errors of prediction do not add up from round to round. Real pairs wait
until the head is asked to draft: a chain's graph evaluates them with the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.eagle.pair_head import EagleRows, PairCells
from specrun.runtime.heads import MOST_CHAIN_ROWS, ChainTokens, FloatRows, RowPiece, TextRows

_NODES = 32  # for which there is room at first


class EagleState(TextRows[EagleRows]):
    """The pairs of a text are rows of the target's features; a round's nodes lie in cells behind.

    Nodes are numbered from 0 in the order of their evaluation.
    """

    def __init__(self, cells: PairCells) -> None:
        super().__init__(self._evaluate_real, cells.n_cells, ahead=1)
        self._cells = cells
        self._root: EagleRows | None = None
        self._nodes: DraftNodes | None = None

    @property
    def room(self) -> int:
        """How many pairs or nodes may still be evaluated."""
        return super().room - (0 if self._nodes is None else len(self._nodes))

    def root(self, tokens: Sequence[int]) -> EagleRows | None:
        """Forget all nodes and return the row after the last token, None if it is not known."""
        self._nodes = None
        self._root = self.said(tokens)
        return self._root

    def chain(
        self, tokens: Sequence[int], n: int, *, probabilities: bool = False
    ) -> ChainTokens | None:
        """Forget all nodes; return up to n tokens of a greedy chain after the last, in one graph.

        None where the last pair is not known, or the head has no graph for it.
        """
        # The chain overwrites the cells behind the real pairs, and with them all nodes.
        self._nodes = self._root = None
        piece = self.due(tokens, MOST_CHAIN_ROWS)
        n = min(n, 1 + self.room)
        if piece is None or n < 1:
            return None
        drafted = self._cells.chain(
            piece.tokens,
            piece.rows,
            piece.position,
            piece.count,
            n,
            probabilities=probabilities,
        )
        if drafted is not None:
            # Only after the graph has run: an interrupt before leaves the pairs due again.
            self.settle(piece)
        return drafted

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> EagleRows:
        """Evaluate a depth of the tree: token i below node `parents[i]` (ROOT: the last token)."""
        assert self._root is not None
        if self._nodes is None:
            # The root's predicted state is what the first depth is paired with.
            self._nodes = DraftNodes(self._root.states[0])
        nodes, count, n = self._nodes, self.count, len(tokens)
        first = count + len(nodes)
        states, above = nodes.add(parents)
        # A node sees the whole text, its ancestors and itself: never its siblings.
        sees = np.empty((n, first + n), np.bool_)
        sees[:, :count] = True
        sees[:, count:] = above
        # All nodes of a call are of one depth; a node sees one node for each depth down to itself.
        depth = int(above[0].sum())
        # Siblings share a position, as llama.cpp's trees do; cells tell them apart.
        positions = np.full(n, self.base + count + depth - 1, np.int32)
        cells = np.arange(first, first + n, dtype=np.int64)
        rows = self._cells.evaluate(tokens, states, positions, cells, sees)
        nodes.predicted(rows.states)
        return rows

    def _evaluate_real(self, piece: RowPiece) -> EagleRows:
        """Put real pairs into cells, each seeing all before it; return the row after the last."""
        n, count = len(piece), piece.count
        positions = np.arange(piece.position, piece.position + n, dtype=np.int32)
        cells = np.arange(count, count + n, dtype=np.int64)
        sees = np.tri(n, count + n, count, dtype=np.bool_)
        rows = self._cells.evaluate_features(piece.tokens, piece.rows, positions, cells, sees)
        last = slice(n - 1, n)
        # A copy of one row, as the view dies while the draft is still drawn from it.
        logits = None if rows.logits is None else rows.logits[last].copy()
        return EagleRows(rows.states[last], rows.tokens[last], rows.log_probs[last], logits)


class DraftNodes:
    """A round's draft nodes: the states predicted at them, and which nodes each sees, with itself.

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
        """Add nodes; return the states they read [n, hidden] and the nodes they see [n, nodes]."""
        first, n = self._n, len(parents)
        end, room = first + n, self._sees.shape[1]
        if end > room:
            more = max(end, 2 * room) - room
            self._states = np.pad(self._states, ((0, more), (0, 0)))
            self._sees = np.pad(self._sees, ((0, more), (0, more)))
        # Node i is row i + 1, so ROOT = -1 is row 0, which sees no node.
        rows = np.array(parents) + 1
        self._sees[first + 1 : end + 1] = self._sees[rows]
        own = np.arange(first, end)
        # Each node sees what its parent sees, and itself: ancestors, never siblings.
        self._sees[own + 1, own] = True
        self._n = end
        return self._states[rows], self._sees[first + 1 : end + 1, :end]

    def predicted(self, states: FloatRows) -> None:
        """Note the states predicted at the nodes that were added last."""
        self._states[self._n + 1 - len(states) : self._n + 1] = states
