"""EAGLE drafts: static trees of EAGLE-1, dynamic ones of EAGLE-2, and a conversation's state."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.eagle.head import EagleRows, PairCells
from specrun.runtime.drafters.kept_rows import RowMemory, TreeRows
from specrun.runtime.drafters.path_laws import (
    EvaluatedDepth,
    HighestLogits,
    PathLaws,
    Paths,
    check_p_min,
    grow_draft,
)
from specrun.runtime.drafters.states_drafter import StatesDrafter
from specrun.runtime.heads import FloatRows, RankedTokens
from specrun.runtime.heads.graph_trees import GraphTrees
from specrun.runtime.heads.graphs import MOST_CHAIN_ROWS, ChainTokens
from specrun.runtime.heads.states import RowPiece, TextRows
from specrun.runtime.heads.tree_graphs import NamedChildren, TreePlan
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.planning import DraftPlan
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees.eagle2 import DynamicShape, check_sampling
from specrun.runtime.trees.growth import TreeSampling, draft_chain
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree

# == The state of one conversation: real pairs of its text, and below them a round's nodes =========
#
# A real pair joins the target's features at a position (its hidden state, or inputs of its layers)
# with the token after it. Draft nodes are pairs, too, whose feature the head predicted itself.
# After each round the accepted positions get real pairs in the place of the predicted ones that
# drafted them, as in the references: errors of prediction do not add up from round to round. Real
# pairs wait until the head is asked to draft: a chain's graph evaluates them with the draft.


_ITSELF = np.ones((1, 1), np.bool_)


class EagleState(TextRows[EagleRows]):
    """The pairs of a text are rows of the target's features; a round's nodes lie in cells behind.

    Nodes are numbered from 0 in the order of their evaluation.
    """

    def __init__(self, cells: PairCells) -> None:
        super().__init__(self._evaluate_real, cells.n_cells, ahead=1)
        self._cells = cells
        self._root: EagleRows | None = None
        self._nodes: DraftNodes | None = None
        self._asked: dict[str, int] = {}  # how many of the highest logits, if any
        self._places: dict[tuple[int, int], int] = {}  # nodes by parent and token

    @property
    def room(self) -> int:
        """How many pairs or nodes may still be evaluated."""
        left, nodes = super().room, self._nodes
        return left if nodes is None else left - len(nodes)

    @property
    def n_nodes(self) -> int:
        """How many nodes of the draft were evaluated."""
        return 0 if self._nodes is None else len(self._nodes)

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the evaluated node of a token below another; None if none is."""
        return self._places.get((parent, token))

    def root(self, tokens: Sequence[int], highest: int = 0) -> EagleRows | None:
        """Forget all nodes and return the row after the last token, None if it is not known.

        `highest` asks for so many logits of this row and of those below it.
        """
        self._nodes = None
        self._places = {}
        self._asked = {"highest": highest} if highest else {}
        self._root = self.said(tokens)
        if self._root is not None and self._root.n_highest != highest:
            self.forget_said()  # it was asked for something else
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
        if piece is None:
            return None
        # The last one needs no cell: nothing is drafted after it.
        n = min(n, 1 + self._n_cells - piece.count - len(piece.tokens))
        if n < 1:
            return None
        drafted = self._cells.chain(piece, n, probabilities=probabilities)
        if drafted is not None:
            # Only after the graph has run: an interrupt before leaves the pairs due again.
            self.settle(piece)
        return drafted

    def tree(self, tokens: Sequence[int], plan: TreePlan) -> NamedChildren | None:
        """Forget all nodes; return what a plan's tree names after the last token, in one graph.

        None where the last pair is not known, there is no room for all of it, or the head has no
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
            # The root's predicted state is what the first depth is paired with.
            self._nodes = DraftNodes(self._root.states)
        nodes, n_nodes, n = self._nodes, len(self._nodes), len(tokens)
        base, count, *_ = self._held
        first = count + n_nodes
        for node, named in enumerate(zip(parents, tokens, strict=True), n_nodes):
            self._places.setdefault(named, node)
        states, place = nodes.add(parents)
        # A node sees the whole text, its ancestors and itself: never its siblings. They share a
        # position, as llama.cpp's trees do; cells tell them apart.
        positions = [base + count + place.depth - 1] * n
        places = positions, range(first, first + n), count, place.sees
        rows = self._cells.evaluate(tokens, states, places, **self._asked)
        nodes.predicted(rows.states)
        return rows

    def _evaluate_real(self, piece: RowPiece) -> EagleRows:
        """Put real pairs into cells, each seeing all before it; return the row after the last."""
        n, start, count = len(piece), piece.position, piece.count
        sees = _ITSELF if n == 1 else np.tri(n, dtype=np.bool_)
        places = range(start, start + n), range(count, count + n), count, sees
        rows = self._cells.evaluate_features(piece.tokens, piece.rows, places, **self._asked)
        return rows.last()


class EagleNodes:
    """What of a tree below a text the head has evaluated, for rules that read its leaves.

    (`EvaluatedNodes`.)
    """

    def __init__(self, state: EagleState, tokens: Sequence[int]) -> None:
        self._state, self._tokens = state, tokens
        self.place_of = state.place_of

    def leaf(self, parent: int, token: int) -> tuple[int, FloatRows] | None:
        """Evaluate a token below a node."""
        state = self._state
        if state.room < 1:
            return None
        return state.n_nodes, state.below([parent], [token]).whole[0]

    def root(self) -> FloatRows | None:
        """Evaluate the text."""
        row = self._state.root(self._tokens)
        return None if row is None else row.whole[0]


class NodePlaces(NamedTuple):
    """Where the nodes of a call stand: their depth, and which nodes each sees, with itself.

    `above` are the rows of the states that they are paired with: of those predicted by the call
    before, where `is_next`, and otherwise of all states.
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


# Rounds grow the same shapes again and again: what follows from parents alone is worked out once.
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


# == The drafter ===================================================================================
#
# The heads of EAGLE-1 and 2 (Li et al. 2024) read the target's final hidden states, those of
# EAGLE-3 (Li et al. 2025) inputs of some of its layers. The head says which; nothing else differs
# here.


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
        length: DraftPlan | None = None,
        size: DraftPlan | None = None,
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
            # How much is drafted must not change a text from answer to answer: see `DraftPlan`.
            self._length.start(points=ranks and request.keep == "nothing")
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
        self, request: DraftRequest, most: int, length: DraftPlan
    ) -> DraftTree | None:
        """Return a chain as long as it pays; None where the head has no graph for a whole one."""
        most = min(most, length.depth_to_ask())
        if most < 1:
            return DraftTree()
        chain = self._state.chain(request.tokens, most, probabilities=True)
        if chain is None or chain.log_probs is None:
            return None
        return self.stopped(self.shortened(chain.tokens, chain.log_probs, length))

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
