"""A draft model drafts a tree: of a fixed shape (SpecInfer, Sequoia), or dynamic (EAGLE-2)."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specrun.runtime.compiled import draws_of
from specrun.runtime.drafters.draft_model.drafter import SteppedDrafter
from specrun.runtime.drafters.draft_model.state import DraftTreeState
from specrun.runtime.drafters.kept_rows import RowMemory, TreeRows
from specrun.runtime.drafters.path_laws import (
    RANKED_TOKENS,
    EvaluatedDepth,
    PathLaws,
    Paths,
    draft_steps,
    ranking_params,
)
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import Logits
from specrun.runtime.planning import DraftPlan
from specrun.runtime.round.drafter import DraftRequest, RoundOutcome
from specrun.runtime.trees.eagle2 import DynamicShape, check_sampling
from specrun.runtime.trees.growth import LawSource, TreeSampling
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree

_Depth = tuple[Sequence[int], Sequence[int]]
_Steps = Generator[_Depth, Sequence[Logits], DraftTree]
"""A draft in the making: says which depth to evaluate, and is given the rows after it."""


class DraftTreeDrafter(SteppedDrafter[_Depth, Sequence[Logits]]):
    """Grows a tree with a model of its own, all nodes of a depth in one evaluation.

    `shape` is a fixed topology or a `DynamicShape`. `sampling` says how children are proposed (see
    `trees.growth`): "with" or "without" replacement from the drafter's own law, transformed like
    the target's, or "argmax", its most likely tokens as point masses; the text then stays plain
    decoding's own at every temperature. Dynamic shapes take point masses only. At temperature 0
    every scheme takes the most likely tokens, which is what drawing without replacement tends to as
    the temperature falls. With `size` a dynamic tree is as large as it pays.

    The state's context needs as many sequences and output rows as `draft_size` says, and one
    sequence more for rules that read the drafter's rows.
    """

    def __init__(
        self,
        state: DraftTreeState,
        *,
        shape: Topology | DynamicShape,
        sampling: TreeSampling = "without",
        p_min: float = 0.0,
        size: DraftPlan | None = None,
        name: str = "draft",
    ) -> None:
        check_sampling(shape, sampling)
        self._state = state
        super().__init__(self._state, p_min=p_min, name=name)
        self._row_memory = RowMemory()
        self.max_nodes = shape.max_nodes
        self.max_leaves = shape.max_leaves
        # A fixed shape needs the order of tokens alone; path probabilities and p_min the law.
        only_order = isinstance(shape, Topology) and p_min == 0.0
        self._ranked = shape.max_width if only_order else max(RANKED_TOKENS, shape.max_width)
        self._shape, self._sampling, self._size = shape, sampling, size
        # The row of a leaf takes a sequence of its own, beside those of what has children.
        self.keeps_rows = state.context.options.n_sequences > draft_size(shape)[0]
        self._ranking: tuple[SamplingParams, SamplingParams] | None = None
        # Whether compiled code draws trees by these settings: by their identity, too.
        self._drawing: tuple[SamplingParams, bool] | None = None

    def _ask(self, asked: _Depth) -> None:
        parents, tokens = asked
        if parents:
            self._state.ask_depth(parents, tokens)
        else:
            self._state.ask(tokens)

    def _answer(self) -> Sequence[Logits] | None:
        state = self._state
        if not state.n_nodes:
            row = state.answer()
            return None if row is None else [row]
        depth = state.answer_depth()
        if depth is None:
            return None
        return state.first(depth, state.depth_batch.n_tokens)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree; smaller where a limit, the drafter's own context or `p_min` cuts it."""
        prepared = self._take_prepared(request)
        if prepared is not None:
            return prepared
        drawn = self._compiled_tree(request)
        if drawn is not None:
            return drawn
        steps, state = self._drafting(request), self._state
        try:
            parents, tokens = next(steps)
            while True:
                if parents:
                    rows = state.first(state.evaluate(parents, tokens), len(tokens))
                else:
                    rows = [state.feed(tokens)]
                parents, tokens = steps.send(rows)
        except StopIteration as drafted:
            tree: DraftTree = drafted.value
            return tree

    def _compiled_tree(self, request: DraftRequest) -> DraftTree | None:
        """Draw a tree in compiled code; None where rows or laws are looked at here."""
        state, params, shape = self._state, request.params, self._shape
        if not isinstance(shape, Topology) or self._sampling != "without" or self._p_min > 0.0:
            return None
        if self._drawing is None or self._drawing[0] is not params:
            self._drawing = params, not params.is_greedy and state.can_grow(shape, params)
        if not self._drawing[1] or request.keep != "nothing":
            return None
        most = min(request.max_nodes, state.room(request.tokens) + 1)
        topology = shape.limited(request.max_depth, most)
        if request.state.grammar is not None or not topology.parents:
            return None
        draws = draws_of(request.noise, len(request.tokens), topology.max_depth)
        return state.grow_drawn(self._uncached(request), topology, draws, params)

    def _drafting(self, request: DraftRequest) -> _Steps:
        """Draft a tree: yields what to evaluate, parents and tokens, and takes the rows then.

        Without parents that is the text's end: the tokens that are not cached, at least the last.
        """
        state = self._state
        ranks = self._sampling == "argmax" or request.params.is_greedy
        kept = self._kept_rows(request, ranks=ranks)
        # At temperature 0 the order alone is asked for: every scheme takes the most likely tokens.
        if self._size is not None:
            depth = self._size.depth_to_ask()
            if not depth:
                return DraftTree() if kept is None else kept.of(DraftTree())
            request = request.within(depth, request.max_nodes)
        params = self._ranking_params(request.params) if ranks else request.params
        laws = self._laws(request, params)
        # A rule that reads the row of a leaf needs a cell for it.
        room = state.room(request.tokens) - (kept is not None)
        steps = draft_steps(
            self._shape,
            request,
            room=room,
            sampling=self._sampling,
            p_min=self._p_min,
            size=self._size,
        )
        try:
            parents, tokens = next(steps)
            while True:
                first = state.n_nodes if parents else ROOT
                rows = yield parents, tokens or self._uncached(request)
                if kept is not None:
                    kept.take(first, rows)
                parents, tokens = steps.send(laws.read(parents, tokens, rows))
        except StopIteration as drafted:
            tree: DraftTree = drafted.value
            return tree if kept is None else kept.of(tree)

    def _uncached(self, request: DraftRequest) -> Sequence[int]:
        """Return the tokens that are not cached; the last one's row is needed in any case."""
        state, tokens = self._state, request.tokens
        state.rewind(min(len(state.cached), len(tokens) - 1))
        return tokens[len(state.cached) :]

    def _kept_rows(self, request: DraftRequest, *, ranks: bool) -> TreeRows | None:
        """Return what keeps the rows that the request asks for."""
        if request.keep == "nothing" or not self.keeps_rows:
            return None
        # A draw says its law itself; so does, at temperature 0, the first of the tokens drafted.
        said = not ranks or request.params.is_greedy
        # Only there every node that is evaluated has children, whose draws say that law.
        says_all = isinstance(self._shape, Topology) and self._p_min == 0.0
        copies = request.keep == "rows" or not (said and says_all)
        nodes = _ModelNodes(self._state, request.tokens)
        return TreeRows(self._row_memory, nodes, copies=copies)

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one."""
        super().begin(tokens)
        if self._size is not None:
            self._size.begin()

    def laws(self, request: DraftRequest) -> LawSource:
        """Return the laws by which this drafter ranks tokens after the request's tokens."""
        return self._laws(request, self._ranking_params(request.params))

    def _laws(self, request: DraftRequest, params: SamplingParams) -> PathLaws:
        """Return the model as a source of laws: one evaluation for each depth."""
        state = self._state

        def root() -> EvaluatedDepth:
            return [state.feed(self._uncached(request))]

        def below(parents: Sequence[int], drafted: Sequence[int], _paths: Paths) -> EvaluatedDepth:
            return state.first(state.evaluate(parents, drafted), len(drafted))

        return PathLaws(root, below, request, params)

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the accepted tokens' cache, whoever drafted them, and drop the rest."""
        if self.layer_inputs:
            self._state.learn_round(outcome)
        self._state.keep(outcome.tokens[outcome.start :])
        if self._size is not None:
            self._size.observe(outcome)

    # One SamplingParams serves a whole answer: identity tells whether it is still the same.
    def _ranking_params(self, params: SamplingParams) -> SamplingParams:
        if self._ranking is None or self._ranking[0] is not params:
            self._ranking = params, ranking_params(params, self._ranked)
        return self._ranking[1]


class _ModelNodes:
    """What of a tree below a text the draft model has evaluated (`EvaluatedNodes`)."""

    def __init__(self, state: DraftTreeState, tokens: Sequence[int]) -> None:
        self._state, self._tokens, self._start = state, tokens, len(tokens)
        self.place_of = state.place_of

    def leaf(self, parent: int, token: int) -> tuple[int, Logits] | None:
        """Evaluate a token below a node."""
        state = self._state
        if state.room(self._tokens) < state.n_nodes + 1:
            return None
        row = state.shared(state.evaluate([parent], [token]).logits(0))
        return state.n_nodes - 1, row

    def root(self) -> Logits | None:
        """Evaluate the text."""
        state = self._state
        if state.room(self._tokens) < 0:
            return None
        state.rewind(min(len(state.cached), self._start - 1))
        return state.feed(self._tokens[len(state.cached) : self._start])


def draft_size(shape: Topology | DynamicShape) -> tuple[int, int]:
    """Return how many sequences and output rows a draft model needs for trees of this shape."""
    if isinstance(shape, DynamicShape):
        return shape.n_draft_sequences, shape.topk
    return shape.n_inner_leaves, max(shape.inner_widths, default=1)
