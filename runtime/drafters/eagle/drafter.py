"""EAGLE drafts in states of the target: static trees of EAGLE-1, dynamic ones of EAGLE-2 (Li et al.
2024).

The heads of EAGLE-1 and 2 read the target's final hidden states, those of EAGLE-3 (Li et al. 2025)
inputs of some of its layers. The head says which; nothing else differs here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.eagle.pair_head import EagleRows, FloatRows, PairCells
from specrun.runtime.drafters.eagle.state import EagleState
from specrun.runtime.heads import RankedTokens, copied_rows
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import DraftTree
from specrun.runtime.trees import (
    DynamicShape,
    EvaluatedDepth,
    PathLaws,
    Paths,
    Topology,
    TreeSampling,
    check_p_min,
    check_sampling,
    grow_draft,
)


class EagleDrafter(Drafter):
    """Grows a tree with a head that predicts hidden states, all nodes of a depth in one evaluation.

    It is one conversation's: it owns the cells that it was given, and the head is shared. A chain
    of the most likely tokens is one evaluation in all, where the head has a graph for that.

    `shape` is a fixed topology or a `DynamicShape`, which takes point masses only ("argmax").
    Sampled schemes draw from the head's law, transformed like the target's; the head must then
    return whole rows. A node gets no children where the head gives no token the probability
    `p_min`.
    """

    def __init__(
        self,
        cells: PairCells,
        shape: Topology | DynamicShape,
        *,
        sampling: TreeSampling = "argmax",
        p_min: float = 0.0,
        name: str = "eagle",
    ) -> None:
        check_sampling(shape, sampling)
        check_p_min(p_min)
        self.name = name
        self.needs_hidden_states = not cells.taps
        self.layer_inputs = tuple(sorted(set(cells.taps)))
        self.max_nodes = shape.max_nodes
        self.max_leaves = shape.max_leaves
        self._cells = cells
        self._shape = shape
        self._sampling = sampling
        self._p_min = p_min
        # A chain that may end early goes by depth: at any size that matters a token costs more than
        # Python does.
        self._is_whole_chain = isinstance(shape, Topology) and shape.n_leaves == 1 and p_min == 0.0
        self._state = EagleState(cells)
        self._prompt: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the pairs of what the prompt shares with the last text."""
        self._prompt = list(tokens)
        self._state.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Cache the prompt's pairs."""
        self._state.learn(start, self._features(rows, range(count)), self._prompt)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree; none where the hidden state before the last token is not known."""
        if request.max_depth < 1 or request.max_nodes < 1:
            return DraftTree()
        ranks = self._sampling == "argmax" or request.params.is_greedy
        if ranks and self._is_whole_chain:
            chain = self._state.chain(
                request.tokens, min(self.max_nodes, request.max_depth, request.max_nodes)
            )
            if chain is not None:
                return DraftTree.chain(chain.tokens)
        row = self._state.root(request.tokens)
        if row is None:
            return DraftTree()
        state, room = self._state, self._state.room()

        def below(parents: Sequence[int], tokens: Sequence[int], _paths: Paths) -> EvaluatedDepth:
            return _said(state.below(parents, tokens), ranks=ranks)

        laws = PathLaws(lambda: _said(row, ranks=ranks), below, request, request.params)
        sampling, p_min = self._sampling, self._p_min
        return grow_draft(self._shape, laws, request, room=room, sampling=sampling, p_min=p_min)

    def observe(self, outcome: RoundOutcome) -> None:
        """Cache real pairs of the root and the accepted nodes."""
        features = self._features(outcome.rows, outcome.path_rows)
        self._state.learn(outcome.start - 1, features, outcome.tokens)

    def rewind(self, length: int) -> None:
        """Forget the pairs of tokens that were only guesses."""
        self._state.cut(length)

    def _features(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy of what the head reads of the target at these rows, [n, features]."""
        taps = self._cells.taps
        if taps:
            return np.stack(
                [np.concatenate([rows.layer_input(row, layer) for layer in taps]) for row in wanted]
            )
        return copied_rows([rows.hidden_state(row) for row in wanted])

    @property
    def native_seconds(self) -> float:
        """Time in this conversation's graphs of the head."""
        return self._cells.native_seconds

    @property
    def n_params(self) -> int:
        """The head's parameters."""
        return self._cells.n_params

    def close(self) -> None:
        """Free the cells."""
        self._cells.close()


def _said(rows: EagleRows, *, ranks: bool) -> EvaluatedDepth:
    """Return the best tokens as they are, or whole rows for draws."""
    if ranks:
        return RankedTokens(rows.tokens, rows.log_probs)
    if rows.logits is None:
        raise OptionError("an EAGLE head that draws must be opened with whole rows")
    return list(rows.logits)
