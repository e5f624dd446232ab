"""EAGLE drafts: static trees of EAGLE-1, dynamic ones of EAGLE-2, and a conversation's state."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.eagle.head import EagleRows, PairCells
from specrun.runtime.drafters.growing.source import HighestLogits, NodeRows
from specrun.runtime.drafters.states_source import StatesSource
from specrun.runtime.heads import FloatRows, RankedTokens
from specrun.runtime.heads.states import RowPiece, TextRows
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.trees.tree import ROOT

# == The state of one conversation: real pairs of its text, and below them a round's nodes =========
#
# A real pair joins the target's features at a position (its hidden state, or inputs of its layers)
# with the token after it. Draft nodes are pairs, too, whose feature the head predicted itself.
# After each round the accepted positions get real pairs in the place of the predicted ones that
# drafted them, as in the references: errors of prediction do not add up from round to round. Real
# pairs wait until the head drafts: a chain's graph evaluates them with the draft.


class EagleState(TextRows[EagleRows]):
    """The pairs of a text are rows of the target's features; a round's nodes lie in cells behind.

    Nodes are numbered from 0 in the order of their evaluation. With a `window` the head sees at
    most so many of the last pairs, and at least three quarters of them.
    """

    def __init__(self, cells: PairCells, window: int = 0) -> None:
        step = max(1, window // 4)  # all cells move at each
        super().__init__(
            *(self._evaluate_real, cells.n_cells),
            ahead=1,
            window=window,
            drop=cells.drop,
            step=step,
        )
        self._cells = cells
        self._parents: tuple[int, ...] = ()  # of the nodes
        self._states: FloatRows | None = None  # predicted at the text's last token, and the nodes
        self._highest = 0  # how many of the highest logits are requested

    def root(self, tokens: Sequence[int], highest: int = 0) -> EagleRows | None:
        """Forget all nodes and return the row after the last token, None if it is not known.

        `highest`: so many logits of this row and of those below it.
        """
        self._parents, self._highest = (), highest
        root = self.said(tokens)
        if root is not None and root.n_highest != highest:
            self.forget_said()  # something else was requested
            root = self.said(tokens)
        self._states = None if root is None else root.states
        return root

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> EagleRows:
        """Evaluate a depth of the tree: token i below node `parents[i]` (ROOT: the last token)."""
        assert self._states is not None
        base, count, *_ = self._held
        before, n = self._parents, len(tokens)
        self._parents = (*before, *parents)
        depth, sees = _lines(self._parents, n)
        # A node is paired with the state predicted above it. It sees the whole text, its ancestors
        # and itself: never its siblings. They share a position, as llama.cpp's trees do; cells tell
        # them apart.
        above = self._states.take([parent + 1 for parent in parents], axis=0)
        first = count + len(before)
        places = [base + count + depth - 1] * n, range(first, first + n), count, sees
        rows = self._cells.evaluate(tokens, above, places, highest=self._highest)
        self._states = np.concatenate([self._states, rows.states])
        return rows

    def _evaluate_real(self, piece: RowPiece) -> EagleRows:
        """Put real pairs into cells, each seeing all before it; return the row after the last."""
        n, start, count = len(piece), piece.position, piece.count
        places = range(start, start + n), range(count, count + n), count, np.tri(n, dtype=np.bool_)
        highest = self._highest
        return self._cells.evaluate(
            piece.tokens, piece.rows, places, real=True, highest=highest
        ).last()


# Rounds grow the same shapes again and again.
@functools.lru_cache(maxsize=256)
def _lines(parents: tuple[int, ...], n: int) -> tuple[int, npt.NDArray[np.bool_]]:
    """Return the depth of the last n nodes, and which nodes each sees: itself and its ancestors."""
    first = len(parents) - n
    sees = np.zeros((n, len(parents)), np.bool_)
    for row in range(n):
        node = first + row
        while node != ROOT:
            sees[row, node] = True
            node = parents[node]
    return int(sees[0].sum()), sees


# == The source of rows ============================================================================
#
# The heads of EAGLE-1 and 2 (Li et al. 2024) read the target's final hidden states, those of
# EAGLE-3 (Li et al. 2025) inputs of some of its layers. The head's file names them; nothing else
# differs here.


class EagleSource(StatesSource[EagleState]):
    """A head that predicts hidden states: rows of all nodes of a depth in one evaluation.

    A tree of the most likely tokens is one evaluation in all, if the head has a graph for that.
    Schemes that draw need a head that was opened with whole rows.
    """

    names_trees = True

    def __init__(self, cells: PairCells, window: int = 0) -> None:
        head = cells.head
        super().__init__(
            EagleState(cells, window), cells, head.n_params, head.depth_params, head.taps
        )
        self.keeps_rows, self.most_highest = head.whole_rows, head.most_highest

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many nodes have cells behind the text's pairs."""
        return self.state.room

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the pairs that wait; None if the state before the last token is unknown."""
        row = self.state.root(request.tokens, highest)
        return None if row is None else _node_rows(row)

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        """Evaluate a depth."""
        return _node_rows(self.state.below(parents, tokens))


def _node_rows(rows: EagleRows) -> NodeRows:
    """Return the best tokens, and for draws the highest logits or whole rows."""
    whole = None if rows.logits is None else list(rows.logits)
    if rows.log_probs is not None:
        return NodeRows(whole, RankedTokens(rows.tokens, rows.log_probs))
    if rows.highest is not None and whole is None:
        return NodeRows(highest=HighestLogits(rows.tokens, rows.highest))
    return NodeRows(whole)
