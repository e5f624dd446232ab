"""The state that Hydra's heads read: of the position before the last committed token, true after any rounds.

Without a prefix layer it is the target's own hidden state there. With one it is the layer's output, for which the layer
has to have seen the states of all positions before: they are cached as the text is committed, and no drafts among them.
They wait until the heads are asked to draft: a chain's graph evaluates them with the draft.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.pending_rows import RowPiece, TextRows
from specrun.runtime.heads.chain_words import MOST_CHAIN_ROWS, ChainWords

__all__ = ["HydraState", "ReadsStates", "StateCells"]

FloatRows = npt.NDArray[np.float32]


class StateCells(Protocol):
    """Cells of the layer that makes states of hidden states; `heads.prefix_layer.PrefixCells` are."""

    n_cells: int


class ReadsStates(Protocol):
    """Heads as a conversation has them; `heads.hydra_head.HydraCells` are."""

    @property
    def prefix(self) -> StateCells | None:
        """The cells of what makes the heads' state of hidden states, None where they read those."""

    def states(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """See `HydraCells.states`."""

    def chain(
        self, states: FloatRows, position: int, count: int, token: int, n: int, *, probabilities: bool = False
    ) -> ChainWords | None:
        """See `HydraCells.chain`."""


class HydraState:
    """The positions of a text are `TextRows` of the target's hidden states.

    Without a prefix layer none of them lies in a cell anywhere, there is room for all, and only the last one is read.
    """

    def __init__(self, heads: ReadsStates) -> None:
        self._heads = heads
        prefix = heads.prefix
        self._rows = TextRows(self._evaluate, sys.maxsize if prefix is None else prefix.n_cells, ahead=0)

    @property
    def reads_all(self) -> bool:
        """Whether it wants the states of all positions; otherwise the last one is enough."""
        return self._heads.prefix is not None

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep what holds for a text as well."""
        self._rows.begin(tokens)

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self._rows.cut(length)

    def learn(self, start: int, states: FloatRows, tokens: Sequence[int]) -> None:
        """Take the hidden states [n, hidden] of positions `start` on; see `TextRows.learn`."""
        self._rows.learn(start, states, tokens)

    def at_end(self, tokens: Sequence[int]) -> FloatRows | None:
        """Return the state [hidden] before the last token of a text, None where it is not known."""
        return self._rows.said(tokens)

    def chain(self, tokens: Sequence[int], n: int) -> ChainWords | None:
        """Return n tokens of a greedy chain after the last token of a text, evaluated at once.

        None where the state before it is not known, or the heads have no graph for it.
        """
        piece = self._rows.due(tokens, MOST_CHAIN_ROWS)
        if piece is None:
            return None
        words = self._heads.chain(piece.rows, piece.position, piece.count, tokens[-1], n)
        if words is not None:
            self._rows.settle(piece)
        return words

    def _evaluate(self, piece: RowPiece) -> FloatRows:
        state: FloatRows = self._heads.states(piece.rows, piece.position, piece.count)[-1]
        return state
