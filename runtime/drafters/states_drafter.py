"""Base of drafters with heads: the target's states of every committed position, kept as rows.

EAGLE's heads, Hydra's and NextN blocks read the target's states along the whole text. After every
round the states of the root and of the accepted nodes are learnt (never those of the drafts that
were rejected), and over a prompt those of what the target had not cached.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specrun.runtime.heads import FloatRows, TextRows
from specrun.runtime.planning import DraftPlan
from specrun.runtime.round.drafter import Drafter, DraftRequest, Owned, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees.tree import ROOT, DraftTree

_ROOT_ROWS = (0,)  # those of most rounds


class Cells(Owned, Protocol):
    """What one conversation has of a head: its cache, and the native time that it caused."""

    @property
    def native_seconds(self) -> float:
        """Time in this conversation's graphs."""


class StatesDrafter(Drafter):
    """One conversation's drafter: it owns `cells` of a head that conversations share.

    `state` are the rows of the text, `n_params` the parameters of the head. `length` plans chains
    and `size` dynamic trees, if how much is drafted is not fixed.
    """

    def __init__(
        self,
        name: str,
        state: TextRows[Any],
        cells: Cells,
        n_params: int,
        length: DraftPlan | None = None,
        size: DraftPlan | None = None,
    ) -> None:
        self.name, self._text_rows, self._owned = name, state, cells
        self._n_params, self._length, self._size = n_params, length, size
        self._prompt: list[int] = []

    @abstractmethod
    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy [n, width] of what the head reads of the target at these rows."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the states of what the prompt shares with the last text."""
        self._prompt = list(tokens)
        self._text_rows.begin(tokens)
        if self._length is not None:
            self._length.begin()
        if self._size is not None:
            self._size.begin()

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Take the prompt's states."""
        held, wanted = self._text_rows, range(count)
        if not held.reads_all:  # earlier states would be copied and never read
            wanted = wanted[-1:]
        states = self.read_states(rows, wanted)
        held.learn(start + count - len(wanted), states, self._prompt)

    def observe(self, outcome: RoundOutcome) -> None:
        """Take the states of the root and the accepted nodes; learn how much pays."""
        # Row 0 is the root's, the last committed token: its position is one before the round's
        # first, and there is a row for it and for each token of the path.
        tokens, held = outcome.tokens, self._text_rows
        wanted = outcome.path_rows if outcome.path else _ROOT_ROWS
        if not held.reads_all:  # as over a prompt
            wanted = wanted[-1:]
        start = len(tokens) - len(wanted) - (outcome.next_token is not None)
        held.learn(start, self.read_states(outcome.rows, wanted), tokens)
        if self._length is not None:
            self._length.observe(outcome)
        if self._size is not None:
            self._size.observe(outcome)

    def stopped(self, tree: DraftTree) -> DraftTree:
        """Note a chain that `length` stopped; return it."""
        return tree if self._length is None else self._length.drafted(tree)

    def shortened(self, tokens: list[int], log_probs: FloatRows, plan: DraftPlan) -> DraftTree:
        """Return as much of a chain as pays; its tokens were chosen, so this choice is exact."""
        values = np.exp(np.cumsum(log_probs, dtype=np.float64)).tolist()
        kept = plan.best(values, range(ROOT, len(tokens) - 1), len(tokens))
        return DraftTree.chain(list(tokens[: len(kept)]))

    def within_what_pays(self, request: DraftRequest, size: DraftPlan) -> tuple[DraftRequest, int]:
        """Return the request as deep as `size` asks in a round, and that depth; 0: not at all."""
        depth = size.depth_to_ask()
        return request.within(depth, request.max_nodes), depth

    def rewind(self, length: int) -> None:
        """Forget the states of tokens that were only guesses."""
        self._text_rows.cut(length)

    @property
    def native_seconds(self) -> float:
        """Time in the graphs that this conversation ran."""
        return self._owned.native_seconds

    @property
    def n_params(self) -> int:
        """The head's parameters."""
        return self._n_params

    def close(self) -> None:
        """Free the cells."""
        self._owned.close()
