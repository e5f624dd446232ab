"""Base of heads: the target's states of every committed position, kept as rows.

EAGLE's heads, Hydra's and NextN blocks read the target's states along the whole text. After every
round the states of the root and of the accepted nodes are learnt (never those of rejected drafts),
and over a prompt those that the target had not cached.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.growing.source import Source
from specrun.runtime.heads import (
    MOST_CHAIN_ROWS,
    FloatRows,
    NamedChildren,
    RowPiece,
    TextRows,
    TreePlan,
)
from specrun.runtime.language import ExpressionOptions
from specrun.runtime.round.drafter import DraftRequest, Owned, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows

_ROOT_ROWS = (0,)  # those of most rounds


def seen_window(options: ExpressionOptions, env: DraftEnvironment, trained: int) -> int:
    """Return how many of the last positions a head sees by `window=` and its file, 0: all."""
    window = options.optional_integer("window")
    if window is not None and window < 1:
        raise OptionError(f"window is {window}: give at least 1, or leave it out")
    if window is not None and env.keeps_rows:
        problem = "a head with a window has no longer seen the whole of a text that was changed"
        advice = "leave window out, or take an exact rule"
        raise OptionError(f"{problem}, and this rule's text depends on its rows: {advice}")
    return min((each for each in (window or 0, trained) if 0 < each < env.n_ctx), default=0)


class Cells(Owned, Protocol):
    """One conversation's cache in a head, and the native time that it caused."""

    @property
    def native_seconds(self) -> float:
        """Time in this conversation's graphs."""

    def copy(self, other: Any, base: int, count: int) -> bool:  # noqa: ANN401 - of the same kind
        """Share or copy the first `count` cells of another text, of the rows from `base` on.

        False if that is impossible; then nothing is changed.
        """


class TreeCells(Cells, Protocol):
    """Those of a head that names whole trees of best tokens."""

    def tree(self, plan: TreePlan, piece: RowPiece, last: int) -> NamedChildren | None:
        """Evaluate a piece of rows, and a tree below the text's last token, in one graph.

        None if one graph cannot do it.
        """


StateT = TypeVar("StateT", bound=TextRows[Any])


class StatesSource(Source, Generic[StateT]):
    """One conversation's rows of a head: `state`, in `cells` that it owns.

    The rows are the target's inputs of its NextN blocks, those of the layers `taps` one after the
    other, in the head's own order, or without either its final hidden states.
    """

    def __init__(
        self,
        state: StateT,
        cells: Cells,
        n_params: int,
        depth_params: float,
        taps: Sequence[int] = (),
    ) -> None:
        self.state, self._owned = state, cells
        self.n_params, self.depth_params = n_params, depth_params
        self._taps, self.layer_inputs = taps, tuple(sorted(set(taps)))
        self.needs_hidden_states = not (taps or self.needs_nextn_states)
        self._prompt: list[int] = []

    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy [n, width] of the target's states at these rows."""
        if self.needs_hidden_states:
            return rows.hidden_states(wanted)
        if self.needs_nextn_states:
            return np.stack([rows.nextn_state(row) for row in wanted])
        taps = self._taps
        return np.stack(
            [np.concatenate([rows.layer_input(row, n) for n in taps]) for row in wanted]
        )

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the states of the prompt's common part with the last text."""
        self._prompt = list(tokens)
        self.state.begin(tokens)

    def take_over(self, other: Source, length: int) -> int:
        """Take over another conversation's rows."""
        if not isinstance(other, type(self)):
            return 0
        copy = functools.partial(self.copy_cells, other)
        return self.state.take_over(other.state, length, copy)

    def copy_cells(self, other: Self, base: int, count: int) -> bool:
        """Share or copy the first `count` cells of another conversation's text."""
        return self._owned.copy(other._owned, base, count)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Take the prompt's states, as far back as the head sees."""
        held, wanted = self.state, range(count)
        if held.window:
            wanted = wanted[max(0, len(self._prompt) - 1 - held.window - start) :]
        if not wanted:
            return
        if not held.reads_all:  # earlier states would be copied and never read
            wanted = wanted[-1:]
        states = self.read_states(rows, wanted)
        held.learn(start + count - len(wanted), states, self._prompt)

    def observe(self, outcome: RoundOutcome) -> None:
        """Take the states of the root and the accepted nodes."""
        # Row 0 is the root's, the last committed token: its position is one before the round's
        # first, and there is a row for it and for each token of the path.
        tokens, held = outcome.tokens, self.state
        wanted = outcome.path_rows if outcome.path else _ROOT_ROWS
        if not held.reads_all:  # as over a prompt
            wanted = wanted[-1:]
        start = len(tokens) - len(wanted) - (outcome.next_token is not None)
        held.learn(start, self.read_states(outcome.rows, wanted), tokens)

    def rewind(self, length: int) -> None:
        """Forget the states of tokens that were only guesses."""
        self.state.cut(length)

    def named(self, request: DraftRequest, plan: TreePlan) -> NamedChildren | None:
        """Name a tree in the graph that evaluates the waiting rows, if the head has one."""
        tokens = request.tokens
        piece = self.state.due(tokens, MOST_CHAIN_ROWS)
        if piece is None or plan.n_drafted > self.room(tokens):
            return None
        named = cast("TreeCells", self._owned).tree(plan, piece, tokens[-1])
        if named is not None:
            self.state.settle(piece)
        return named

    @property
    def native_seconds(self) -> float:
        """Time in the graphs that this conversation ran."""
        return self._owned.native_seconds

    def close(self) -> None:
        """Free the cells."""
        self._owned.close()
