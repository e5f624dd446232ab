"""EAGLE drafts in states of the target: static trees of EAGLE-1, dynamic ones of EAGLE-2.

The heads of EAGLE-1 and 2 (Li et al. 2024) read the target's final hidden states, those of EAGLE-3
(Li et al. 2025) inputs of some of its layers. The head says which; nothing else differs here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.runtime.costs.draft_length import DraftLength
from specrun.runtime.costs.tree_size import TreeSize
from specrun.runtime.drafter import DraftRequest
from specrun.runtime.drafters.eagle.pair_cells import EagleRows, PairCells
from specrun.runtime.drafters.eagle.state import EagleNodes, EagleState
from specrun.runtime.drafters.kept_rows import RowMemory, TreeRows
from specrun.runtime.drafters.states_drafter import StatesDrafter
from specrun.runtime.heads import FloatRows, RankedTokens
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree
from specrun.runtime.trees.eagle2_tree import DynamicShape, check_sampling
from specrun.runtime.trees.graph_trees import GraphTrees
from specrun.runtime.trees.growth import TreeSampling, draft_chain
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree_laws import (
    EvaluatedDepth,
    HighestLogits,
    PathLaws,
    Paths,
    check_p_min,
    grow_draft,
)

_MOST_HIGHEST = 128  # logits that a graph ranks for draws: more are looked for in whole rows


class EagleDrafter(StatesDrafter):
    """Grows a tree with a head that predicts hidden states, all nodes of a depth in one evaluation.

    A chain or tree of the most likely tokens is one evaluation in all, where the head has a graph
    for that.

    `shape` is a fixed topology or a `DynamicShape`, which takes point masses only ("argmax").
    Sampled schemes draw from the head's law, transformed like the target's; the head must then
    return whole rows. A node gets no children where the head gives no token the probability
    `p_min`. With `length` the shape is a chain, and as long as it pays; with `size` it is dynamic,
    and as large as it pays.
    """

    def __init__(
        self,
        cells: PairCells,
        shape: Topology | DynamicShape,
        *,
        sampling: TreeSampling = "argmax",
        p_min: float = 0.0,
        length: DraftLength | None = None,
        size: TreeSize | None = None,
        name: str = "eagle",
    ) -> None:
        check_sampling(shape, sampling)
        check_p_min(p_min)
        self._state, self._cells = EagleState(cells), cells
        super().__init__(name, self._state, cells, cells.n_params, length, size)
        self.needs_hidden_states = not cells.taps
        self.layer_inputs = tuple(sorted(set(cells.taps)))
        self.max_nodes = shape.max_nodes
        self.max_leaves = shape.max_leaves
        self._taps = cells.taps
        self._shape, self._sampling, self._p_min = shape, sampling, p_min
        # What may end early is drafted depth by depth: at any size that matters a token drafted in
        # vain costs more than Python does.
        self._is_whole = p_min == 0.0
        self._is_chain = isinstance(shape, Topology) and shape.n_leaves == 1
        self._trees = GraphTrees(shape)
        self.keeps_rows = cells.whole_rows
        self._row_memory = RowMemory()

    @property
    def depth_params(self) -> float:
        """The head's, and the output matrix that it reads."""
        return self._cells.depth_params

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree; none where the hidden state before the last token is not known."""
        if request.keep in ("nothing", "points") or not self.keeps_rows:
            return self._drafted_tree(request, None)
        nodes = EagleNodes(self._state, request.tokens)
        # Every row that a graph is asked for is there: keeping it costs a copy.
        rows = TreeRows(self._row_memory, nodes, copies=True)
        return rows.of(self._drafted_tree(request, rows))

    def _drafted_tree(self, request: DraftRequest, kept: TreeRows | None) -> DraftTree:
        if request.max_depth < 1 or request.max_nodes < 1:
            return DraftTree()
        depth = None
        if self._size is not None:
            request, depth = self.within_what_pays(request, self._size)
        if depth == 0:
            return DraftTree()
        # Ranked tokens come from the head's graph; laws to draw from need whole rows.
        ranks = self._sampling == "argmax" or request.params.is_greedy
        if self._length is not None:
            # How much is drafted must not change a text from answer to answer: see `DraftLength`.
            self._length.start(points=ranks and request.keep == "nothing")
        if ranks and self._is_whole and kept is None:
            drafted = self._in_one_graph(request, depth)
            if drafted is not None:
                return drafted
        # Rules that weigh the head's laws read whole rows of it.
        highest = 0 if ranks or kept is not None else self._highest(request.params)
        state, row = self._state, self._state.root(request.tokens, highest)
        if row is None:
            return DraftTree()
        if kept is not None:
            kept.take(ROOT, row.whole)

        def below(parents: Sequence[int], tokens: Sequence[int], _paths: Paths) -> EvaluatedDepth:
            first = state.n_nodes
            rows = state.below(parents, tokens)
            if kept is not None:
                kept.take(first, rows.whole)
            return _said(rows, ranks=ranks)

        laws = PathLaws(lambda: _said(row, ranks=ranks), below, request, request.params)
        if self._length is not None:
            chain = draft_chain(
                laws.after,
                request.noise,
                len(request.tokens),
                most=min(self.max_nodes, request.max_depth, request.max_nodes, state.room + 1),
                points=ranks,
                threshold=self._p_min,
                stop=self._length,
                end_tokens=request.end_tokens,
            )
            return self.stopped(chain)
        sampling, p_min, room = self._sampling, self._p_min, state.room
        return grow_draft(
            self._shape,
            laws,
            request,
            room=room,
            sampling=sampling,
            p_min=p_min,
            size=self._size,
        )

    def _highest(self, params: SamplingParams) -> int:
        """Return how many of the highest logits say as much as whole rows; 0 where none do."""
        if not 0 < params.top_k <= _MOST_HIGHEST or not params.is_plain:
            return 0
        if params.logit_bias or params.has_penalties:
            return 0
        # One more than top-k keeps: where it is the last one's equal, ids decide between them.
        return params.top_k + 1 if params.top_k < self._cells.most_highest else 0

    def _in_one_graph(self, request: DraftRequest, depth: int | None) -> DraftTree | None:
        """Return a tree of best tokens, None where the head has no graph for a whole one.

        `depth` is how deep a dynamic tree is asked for, where that is chosen.
        """
        max_depth, max_nodes = request.max_depth, request.max_nodes
        most = min(self.max_nodes, max_depth, max_nodes)
        if self._length is not None:
            return self._stopped_chain(request, most, self._length)
        if self._is_chain:
            chain = self._state.chain(request.tokens, most)
            return None if chain is None else DraftTree.chain(chain.tokens)
        named = self._state.tree(request.tokens, self._trees.plan_of(depth))
        if named is None:
            return None
        return self._trees.drafted(named, max_depth, max_nodes, self._size)

    def _stopped_chain(
        self, request: DraftRequest, most: int, length: DraftLength
    ) -> DraftTree | None:
        """Return a chain as long as it pays; None where the head has no graph for a whole one."""
        most = min(most, length.ahead())
        if most < 1:
            return DraftTree()
        chain = self._state.chain(request.tokens, most, probabilities=True)
        if chain is None or chain.log_probs is None:
            return None
        # Point masses: they are chosen, not drawn, so the choice may hang on them.
        count = length.cut(np.exp(chain.log_probs).tolist())
        return self.stopped(DraftTree.chain(chain.tokens[:count]))

    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy [n, features] of the tapped layers' inputs, or of the hidden states."""
        if not self._taps:
            return rows.hidden_states(wanted)
        # Features stand in the head's order of layers, which
        # need not be ascending: fc is trained so.
        return np.stack(
            [np.concatenate([rows.layer_input(row, tap) for tap in self._taps]) for row in wanted]
        )


def _said(rows: EagleRows, *, ranks: bool) -> EvaluatedDepth:
    """Return the best tokens as they are; for draws the highest logits or whole rows."""
    if ranks and rows.log_probs is not None:
        return RankedTokens(rows.tokens, rows.log_probs)
    if rows.highest is not None and rows.logits is None:
        return HighestLogits(rows.tokens, rows.highest)
    return rows.whole
