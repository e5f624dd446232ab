"""EAGLE drafts: static trees of EAGLE-1, dynamic ones of EAGLE-2, and a conversation's state."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.eagle.head import EagleRows, PairCells
from specrun.runtime.drafters.growing.source import HighestLogits, NodeRows
from specrun.runtime.drafters.states_source import StatesSource
from specrun.runtime.heads import FloatRows, RankedTokens
from specrun.runtime.heads.graphs import MOST_CHAIN_ROWS
from specrun.runtime.heads.states import RowPiece, TextRows
from specrun.runtime.heads.tree_graphs import NamedChildren, TreePlan
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees.tree import ROOT

# == The state of one conversation: real pairs of its text, and below them a round's nodes =========
#
# A real pair joins the target's features at a position (its hidden state, or inputs of its layers)
# with the token after it. Draft nodes are pairs, too, whose feature the head predicted itself.
# After each round the accepted positions get real pairs in the place of the predicted ones that
# drafted them, as in the references: errors of prediction do not add up from round to round. Real
# pairs wait until the head drafts: a chain's graph evaluates them with the draft.


_ITSELF = np.ones((1, 1), np.bool_)


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
        self._root: EagleRows | None = None
        self._nodes: DraftNodes | None = None
        self._asked: dict[str, int] = {}  # how many of the highest logits, if any

    def root(self, tokens: Sequence[int], highest: int = 0) -> EagleRows | None:
        """Forget all nodes and return the row after the last token, None if it is not known.

        `highest`: so many logits of this row and of those below it.
        """
        self._nodes = None
        self._asked = {"highest": highest} if highest else {}
        self._root = self.said(tokens)
        if self._root is not None and self._root.n_highest != highest:
            self.forget_said()  # something else was requested
            self._root = self.said(tokens)
        return self._root

    def tree(self, tokens: Sequence[int], plan: TreePlan) -> NamedChildren | None:
        """Forget all nodes; return a plan's children after the last token, by one graph.

        None if the last pair is not known, there is no room for all of it, or the head has no
        graph for it.
        """
        self._nodes = self._root = None
        piece = self.due(tokens, MOST_CHAIN_ROWS)
        if piece is None or plan.n_drafted > self.room:
            return None
        named = self._cells.tree(plan, piece)
        if named is not None:
            self.settle(piece)
        return named

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> EagleRows:
        """Evaluate a depth of the tree: token i below node `parents[i]` (ROOT: the last token)."""
        assert self._root is not None
        if self._nodes is None:
            # The first depth is paired with the root's predicted state.
            self._nodes = DraftNodes(self._root.states)
        nodes, n_nodes, n = self._nodes, len(self._nodes), len(tokens)
        base, count, *_ = self._held
        first = count + n_nodes
        states, place = nodes.add(parents)
        # A node sees the whole text, its ancestors and itself: never its siblings. They share a
        # position, as llama.cpp's trees do; cells tell them apart.
        positions = [base + count + place.depth - 1] * n
        places = positions, range(first, first + n), count, place.sees
        rows = self._cells.evaluate(tokens, states, places, **self._asked)
        nodes.predicted(rows.states)
        return rows

    def copy_cells(self, other: Self, base: int, count: int) -> bool:
        """Copy pairs."""
        self._cells.copy(other._cells, count)
        return True

    def _evaluate_real(self, piece: RowPiece) -> EagleRows:
        """Put real pairs into cells, each seeing all before it; return the row after the last."""
        n, start, count = len(piece), piece.position, piece.count
        sees = _ITSELF if n == 1 else np.tri(n, dtype=np.bool_)
        places = range(start, start + n), range(count, count + n), count, sees
        rows = self._cells.evaluate_features(piece.tokens, piece.rows, places, **self._asked)
        return rows.last()


class NodePlaces(NamedTuple):
    """Where the nodes of a call stand: their depth, and which nodes each sees, with itself.

    `above` are the rows of the states that they are paired with: of those predicted by the call
    before, if `is_next`, and otherwise of all states.
    """

    depth: int
    sees: npt.NDArray[np.bool_]
    above: npt.NDArray[np.intp]
    is_next: bool


class DraftNodes:
    """A round's draft nodes, and the states predicted at them.

    Row 0 of the states stands for the last token of the text, so node i is row i + 1, and ROOT row
    0. `root` is the state predicted there, [1, hidden].
    """

    def __init__(self, root: FloatRows) -> None:
        self._parents: tuple[int, ...] = ()
        self._states = [root]

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, parents: Sequence[int]) -> tuple[FloatRows, NodePlaces]:
        """Add nodes of one depth; return the states they read [n, hidden] and where they stand."""
        place = _placed(self._parents, tuple(parents), len(self._states[-1]))
        self._parents += tuple(parents)
        states = self._states[-1] if place.is_next else np.concatenate(self._states)
        return states.take(place.above, axis=0), place

    def predicted(self, states: FloatRows) -> None:
        """Note the states predicted at the nodes that were added last."""
        self._states.append(states)


# Rounds grow the same shapes again and again: the parts that depend on parents alone are worked out
# once.
@functools.lru_cache(maxsize=256)
def _placed(before: tuple[int, ...], parents: tuple[int, ...], n_last: int) -> NodePlaces:
    """Return the places of nodes with these parents, of which the last call added `n_last`."""
    known = (*before, *parents)
    first, n = len(before), len(parents)
    sees = np.zeros((n, first + n), np.bool_)
    for row in range(n):
        node = first + row
        # Ancestors and the node itself.
        while node != ROOT:
            sees[row, node] = True
            node = known[node]
    above = np.array(parents) + 1
    start = first + 1 - n_last  # the first row of the states that were predicted last
    is_next = bool(above.min() >= start)
    # A node sees one node for each depth down to itself.
    return NodePlaces(int(sees[0].sum()), sees, above - start if is_next else above, is_next)


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
        super().__init__(EagleState(cells, window), cells, cells.n_params, cells.depth_params)
        self._taps, self.keeps_rows = cells.taps, cells.whole_rows
        self.needs_hidden_states = not cells.taps
        self.layer_inputs = tuple(sorted(set(cells.taps)))
        self.most_highest = cells.most_highest

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many nodes have cells behind the text's pairs."""
        return self.state.room

    def named(self, request: DraftRequest, plan: TreePlan) -> NamedChildren | None:
        """Name a tree in one graph, if the head has one."""
        return self.state.tree(request.tokens, plan)

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the pairs that wait; None if the state before the last token is unknown."""
        row = self.state.root(request.tokens, highest)
        return None if row is None else _node_rows(row)

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        """Evaluate a depth."""
        return _node_rows(self.state.below(parents, tokens))

    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy [n, features] of the tapped layers' inputs, or of the hidden states."""
        if not self._taps:
            return rows.hidden_states(wanted)
        # Features are in the head's order of layers, which
        # need not be ascending: fc is trained so.
        return np.stack(
            [np.concatenate([rows.layer_input(row, tap) for tap in self._taps]) for row in wanted]
        )


def _node_rows(rows: EagleRows) -> NodeRows:
    """Return the best tokens, and for draws the highest logits or whole rows."""
    whole = None if rows.logits is None else list(rows.logits)
    if rows.log_probs is not None:
        return NodeRows(whole, RankedTokens(rows.tokens, rows.log_probs))
    if rows.highest is not None and whole is None:
        return NodeRows(highest=HighestLogits(rows.tokens, rows.highest))
    return NodeRows(whole)
