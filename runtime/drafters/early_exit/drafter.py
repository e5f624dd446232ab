"""Early-exit drafting: a chain from the laws that the target's first layers alone give.

LayerSkip's self-speculative decoding (Elhoushi et al. 2024) without a file of its own, and what
predictive pipelined decoding (PPD, Yang et al. 2023) is on one device. PPD lets the exit's guess
start on a second device while the deep layers of the first still run. On one device nothing runs
meanwhile: when an evaluation ends, the exit's law of its last position is of a token that the
target's own row has just decided. So the first layers go on by themselves, over tokens that they
draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specrun.runtime.costs.draft_length import DraftLength
from specrun.runtime.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.early_exit.exit_layers import ExitCells
from specrun.runtime.drafters.kept_rows import ChainRows, RowMemory, copies_rows
from specrun.runtime.heads import FloatRows
from specrun.runtime.law import Law
from specrun.runtime.text import common_prefix
from specrun.runtime.transform import Logits, penalty_window, transformed_law
from specrun.runtime.tree import DraftTree
from specrun.runtime.trees import RANKED_TOKENS, draft_chain, ranking_params

ExitSampling = Literal["with", "argmax"]


class EarlyExitDrafter(Drafter):
    """Drafts up to `n` tokens, each drawn from its own law ("with") or the most likely ("argmax").

    The keys and values of accepted drafts stay: they are what the first layers compute of the text
    anyway. `p_min` and `length` end a chain as a draft model's. Owns the cells.
    """

    keeps_rows = True

    def __init__(
        self,
        cells: ExitCells,
        n: int,
        *,
        sampling: ExitSampling = "with",
        p_min: float = 0.0,
        length: DraftLength | None = None,
        n_params: int = 0,
        name: str = "early-exit",
    ) -> None:
        self.name, self.max_nodes = name, n
        self._cells, self._sampling, self._p_min = cells, sampling, p_min
        self._length, self._n_params = length, n_params
        self._drafted: Sequence[int] = ()
        self._row_memory = RowMemory()

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer; what the cells hold of its prompt stays."""
        self._drafted = ()
        if self._length is not None:
            self._length.begin()

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain."""
        rows = self._kept_rows(request)
        chain = self._chain(request, rows)
        return chain if rows is None else rows.of(chain)

    def _chain(self, request: DraftRequest, rows: ChainRows | None) -> DraftTree:
        start, cells = len(request.tokens), self._cells
        # The last drafted token is not evaluated, hence one more than there are free cells.
        room = cells.n_cells - start + 1
        most = min(self.max_nodes, request.max_depth, request.max_nodes, room)
        if most < 1:
            return DraftTree()
        points = self._sampling == "argmax" or request.params.is_greedy
        params, reads_law = request.params, self._p_min > 0.0 or self._length is not None
        if self._length is not None:
            self._length.start(points=points)
        if points and not reads_law:
            params = params.replace(temperature=0.0)
        elif params.is_greedy:
            params = ranking_params(params, RANKED_TOKENS)  # a greedy law is always certain

        def law_after(drafted: list[int]) -> Law:
            # Views die with the next evaluation: each row becomes a law before the next is made.
            row = cells.rows(drafted[-1:])[0] if drafted else self._root(request.tokens)
            if rows is not None:
                rows.take(len(drafted) - 1, row)
            window = penalty_window(request.tokens, drafted, params)
            return transformed_law(row, params, window, request.state)

        chain = draft_chain(
            law_after,
            request.noise,
            start,
            most=most,
            points=points,
            threshold=self._p_min,
            stop=self._length,
            end_tokens=request.end_tokens,
        )
        self._drafted = chain.tokens
        return chain

    def _kept_rows(self, request: DraftRequest) -> ChainRows | None:
        """Return what keeps the rows that the request asks for."""
        if request.keep in ("nothing", "points"):
            return None
        cells, text = self._cells, request.tokens

        def after(drafted: Sequence[int]) -> Logits | None:
            if not drafted:
                return self._root(text)
            return cells.rows(drafted[-1:])[0] if len(cells.tokens) < cells.n_cells else None

        copies = copies_rows(request, points=self._sampling == "argmax")
        return ChainRows(self._row_memory, after, copies=copies)

    def _root(self, tokens: Sequence[int]) -> FloatRows:
        return self._cells.after(tokens, common_prefix(self._cells.tokens, tokens))

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn how long chains pay."""
        if self._length is not None:
            self._length.observe(self._drafted, outcome)
        self._drafted = ()

    @property
    def native_seconds(self) -> float:
        """Time in the graphs that this conversation ran."""
        return self._cells.native_seconds

    @property
    def n_params(self) -> int:
        """The parameters of the first layers and the output matrix, which are the target's."""
        return self._n_params

    def close(self) -> None:
        """Free the cells."""
        self._cells.close()
