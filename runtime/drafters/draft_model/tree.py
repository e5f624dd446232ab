"""A draft model drafts a tree: of a fixed shape (SpecInfer, Sequoia), or dynamic (EAGLE-2)."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.runtime.costs.tree_size import TreeSize
from specrun.runtime.drafter import DraftRequest, RoundOutcome
from specrun.runtime.drafters.draft_model.state import DraftTreeState, ModelDrafter
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.tree import DraftTree
from specrun.runtime.trees.eagle2_tree import DynamicShape, check_sampling
from specrun.runtime.trees.growth import LawSource, TreeSampling
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree_laws import (
    RANKED_TOKENS,
    EvaluatedDepth,
    PathLaws,
    Paths,
    grow_draft,
    ranking_params,
)


class DraftTreeDrafter(ModelDrafter):
    """Grows a tree with a model of its own, all nodes of a depth in one evaluation.

    `shape` is a fixed topology or a `DynamicShape`. `sampling` says how children are proposed (see
    `trees.growth`): "with" or "without" replacement from the drafter's own law, transformed like
    the target's, or "argmax", its most likely tokens as point masses; the text then stays plain
    decoding's own at every temperature. Dynamic shapes take point masses only. At temperature 0
    every scheme takes the most likely tokens, which is what drawing without replacement tends to as
    the temperature falls. With `size` a dynamic tree is as large as it pays.

    The state's context needs as many sequences and output rows as `draft_size` says.
    """

    def __init__(
        self,
        state: DraftTreeState,
        *,
        shape: Topology | DynamicShape,
        sampling: TreeSampling = "without",
        p_min: float = 0.0,
        size: TreeSize | None = None,
        name: str = "draft",
    ) -> None:
        check_sampling(shape, sampling)
        self._state = state
        super().__init__(self._state, p_min=p_min, name=name)
        self.max_nodes = shape.max_nodes
        self.max_leaves = shape.max_leaves
        # A fixed shape needs the order of tokens alone; path probabilities and p_min the law.
        only_order = isinstance(shape, Topology) and p_min == 0.0
        self._ranked = shape.max_width if only_order else max(RANKED_TOKENS, shape.max_width)
        self._shape, self._sampling, self._size = shape, sampling, size
        self._ranking: tuple[SamplingParams, SamplingParams] | None = None

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree; smaller where a limit, the drafter's own context or `p_min` cuts it."""
        if self._size is not None and not self._size.pays():
            return DraftTree()
        ranks = self._sampling == "argmax" or request.params.is_greedy
        # At temperature 0 the order alone is asked for: every scheme takes the most likely tokens.
        laws = self.laws(request) if ranks else self._laws(request, request.params)
        room = self._state.room(request.tokens)
        return grow_draft(
            self._shape,
            laws,
            request,
            room=room,
            sampling=self._sampling,
            p_min=self._p_min,
            size=self._size,
        )

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one."""
        super().begin(tokens)
        if self._size is not None:
            self._size.begin()

    def laws(self, request: DraftRequest) -> LawSource:
        """Return the laws by which this drafter ranks tokens after the request's tokens."""
        return self._laws(request, self._ranking_params(request.params))

    def _laws(self, request: DraftRequest, params: SamplingParams) -> LawSource:
        """Return the model as a source of laws: one evaluation for each depth."""
        state, tokens = self._state, request.tokens

        def root() -> EvaluatedDepth:
            """Evaluate the committed tokens that are not cached, and at least the last one."""
            # The last token's row is needed again, though its cell may still be there.
            state.rewind(min(len(state.cached), len(tokens) - 1))
            return [state.feed(tokens[len(state.cached) :])]

        def below(parents: Sequence[int], drafted: Sequence[int], _paths: Paths) -> EvaluatedDepth:
            rows = state.evaluate(parents, drafted)
            return [state.shared(rows.logits(row)) for row in range(len(drafted))]

        return PathLaws(root, below, request, params)

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the accepted tokens' cache, whoever drafted them, and drop the rest."""
        self._state.keep(outcome.tokens[outcome.start :])
        if self._size is not None:
            self._size.observe(outcome)

    # One SamplingParams serves a whole answer: identity tells whether it is still the same.
    def _ranking_params(self, params: SamplingParams) -> SamplingParams:
        if self._ranking is None or self._ranking[0] is not params:
            self._ranking = params, ranking_params(params, self._ranked)
        return self._ranking[1]


def draft_size(shape: Topology | DynamicShape) -> tuple[int, int]:
    """Return how many sequences and output rows a draft model needs for trees of this shape."""
    if isinstance(shape, DynamicShape):
        return shape.n_draft_sequences, shape.topk
    return shape.n_inner_leaves, max(shape.inner_widths, default=1)
