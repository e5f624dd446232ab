"""One drafter that grows: chains and trees of every method, token by token and depth by depth.

A method is a `Source`: it returns rows of logits after nodes. All else is here, once: sampling
schemes, the stops of p_min and of a plan, grammar, penalties, the rows that rules read, limits of
depth and nodes, and steps that several conversations evaluate together. A chain is a tree of width
1. Static shapes grow as in `trees.growth`, dynamic ones (EAGLE-2) as in `trees.eagle2`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.growing.draft import (
    RANKED_TOKENS,
    Draft,
    GrownT,
    RowSteps,
    ranking_params,
)
from specrun.runtime.drafters.growing.kept_rows import DepthNodes, KeptRows, RowMemory
from specrun.runtime.drafters.growing.source import Asked, Source, whole_rows
from specrun.runtime.heads import NamedChildren, ShapePlans, TreePlan
from specrun.runtime.laws.law import RowLaws
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import log_probability, row_cuts
from specrun.runtime.planning import Plan
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows, TargetModel
from specrun.runtime.trees.eagle2 import (
    DynamicShape,
    GrownTree,
    NodeChoice,
    check_sampling,
    expansion_steps,
    path_probability_steps,
)
from specrun.runtime.trees.growth import (
    Stop,
    Threshold,
    TreeSampling,
    proposal_scheme,
    tree_steps,
)
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree

_NO_ENDS: frozenset[int] = frozenset()
_MOST_HIGHEST = 128  # logits that a graph ranks for draws: more are looked for in whole rows


class _Fallback:
    """Ends a chain if the model's largest raw probability is below `least` (BiLD's fallback).

    It takes the place of a plan, but not of a threshold.
    """

    def __init__(self, least: float, plan: Plan | None) -> None:
        self._least, self._is_sure = least, True
        self._exit = plan if plan is not None and plan.is_threshold else None

    def watching(self, steps: RowSteps[GrownT]) -> RowSteps[GrownT]:
        """Read each row before a token is drawn from it."""
        try:
            depth = next(steps)
            while True:
                rows = yield depth
                if rows is not None and rows.whole is not None:
                    row = rows.whole[0]
                    surest = log_probability(row, int(row.argmax()))
                    self._is_sure = surest >= math.log(self._least)
                depth = steps.send(rows)
        except StopIteration as ended:
            done: GrownT = ended.value
            return done

    def goes_on(self) -> bool:
        """Return True: the next row costs little, and decides."""
        return True

    def takes(self, certainty: float) -> bool:
        """Return whether the raw row is sure, whatever the transformed distribution is."""
        return self._is_sure and (self._exit is None or self._exit.takes(certainty))


class GrowingDrafter(Drafter):
    """Grows chains and trees from the rows of a source.

    `shape` is a fixed topology or a `DynamicShape`. `sampling` is the scheme of children (see
    `trees.growth`): "with" or "without" replacement from the source's own distribution, transformed
    like the target's, or "argmax", its most likely tokens as point masses; the text is then plain
    decoding's own at every temperature. Dynamic shapes take point masses only. At temperature 0
    every scheme takes the most likely tokens. A node gets no children if no token there has
    probability `p_min`: that is read before the draw, so exactness holds. At temperature 0 it is
    the probability at temperature 1. `plan` ends chains, or chooses the nodes of dynamic trees.
    """

    def __init__(
        self,
        source: Source,
        shape: Topology | DynamicShape,
        *,
        sampling: TreeSampling = "argmax",
        p_min: float = 0.0,
        plan: Plan | None = None,
        name: str = "draft",
    ) -> None:
        check_sampling(shape, sampling)
        check_p_min(p_min)
        self.name, self.source, self._plan = name, source, plan
        self.max_nodes, self.max_leaves = shape.max_nodes, shape.max_leaves
        self.needs_hidden_states = source.needs_hidden_states
        self.needs_nextn_states = source.needs_nextn_states
        self.layer_inputs, self.reads_logits = source.layer_inputs, source.reads_logits
        self.keeps_rows, self.waits = source.keeps_rows, source.shared is not None
        self.embedding_inputs = source.embedding_inputs
        self.n_params, self.depth_params = source.n_params, source.depth_params
        self._shape, self._sampling, self._p_min = shape, sampling, p_min
        self._is_chain = isinstance(shape, Topology) and shape.n_leaves == 1
        self._depth = shape.max_depth
        self._plans: ShapePlans | None = None
        # Whether no stop reads the distributions; then an answer's settings, and the distributions
        # of its rows if a draft depends on nothing else.
        self._is_plain = p_min == 0.0 and plan is None
        self._way: tuple[SamplingParams | None, RowLaws | None] = None, None
        if source.names_trees and self._depth and p_min == 0.0:
            self._plans = ShapePlans(shape, has_values=plan is not None)
        self._plain_highest = self._highest = 0
        self._row_memory = RowMemory()
        # An answer's settings, those of its draft's distributions, and the numbers read of these.
        self._known: tuple[SamplingParams, SamplingParams, bool] | None = None
        # A draft that is evaluated with others', for which request, and the finished tree.
        self._steps: RowSteps[DraftTree] | None = None
        self._request: DraftRequest | None = None
        self._prepared: DraftTree | None = None

    # -- drafting ----------------------------------------------------------------------------------

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree; smaller if a limit, the source's own room, `p_min` or the plan cuts it."""
        if self._request is not None:  # one was evaluated with others'
            prepared = self._take_prepared(request)
            if prepared is not None:
                return prepared
        if self._is_plain and request.keep == "nothing" and not (self.waits and self.source.waits):
            params, way = request.params, self._way
            # One SamplingParams serves a whole answer: identity shows whether it is still the same.
            laws = way[1] if way[0] is params else self._new_way(params)
            if laws is not None and not request.fallback and request.state.grammar is None:
                return self._plain_draft(request, laws)
        return self._alone(self._drafting(request), request)

    def _new_way(self, params: SamplingParams) -> RowLaws | None:
        """Return how an answer with these settings is drafted for: see `_way`."""
        laws: RowLaws | None = None
        is_greedy = params.is_greedy
        points = is_greedy or self._sampling == "argmax"
        # A greedy chain of favourites ranks nothing.
        ranks = not self._is_chain or self.source.few_tokens
        ranks = ranks if is_greedy else points
        if not (ranks or (points and self._plans is not None)) and isinstance(
            self._shape, Topology
        ):
            cuts = row_cuts(params)
            laws = None if cuts is None else RowLaws(cuts)
        # The distributions are of so many of a row's logits, or of whole rows.
        self._plain_highest = 0 if is_greedy else self._most_highest(params)
        self._way = params, laws
        return laws

    def _plain_draft(self, request: DraftRequest, laws: RowLaws) -> DraftTree:
        """Grow a draft depth by depth, as `_drafting` does, from the rows alone."""
        source, tokens, shape = self.source, request.tokens, self._shape
        assert isinstance(shape, Topology)
        # The last node is not evaluated.
        shape = shape.limited(request.max_depth, min(request.max_nodes, source.room(tokens) + 1))
        source.expect(shape.max_depth)
        rows = source.root(request, self._plain_highest) if shape.parents else None
        if rows is None:
            return DraftTree()
        scheme = proposal_scheme("argmax" if request.params.is_greedy else self._sampling)
        ends = request.end_tokens if self._is_chain else _NO_ENDS
        steps = tree_steps(shape, scheme, request.noise, len(tokens), None, ends)
        next(steps)
        law, below, send = laws.law, source.below, steps.send
        try:
            while rows is not None:
                highest = rows.highest
                if highest is None:
                    rows = below(*send([*map(law, rows.whole or whole_rows(rows))]))
                else:
                    rows = below(*send([*map(law, highest.logits, highest.tokens)]))
        except StopIteration as ended:
            tree: DraftTree = ended.value
            return tree
        return DraftTree()

    def _alone(self, steps: RowSteps[GrownT], request: DraftRequest) -> GrownT:
        """Take all steps, each evaluated at once."""
        source, found = self.source, cast("object", None)
        try:
            asked = next(steps)
            while True:
                if isinstance(asked, TreePlan):
                    found = source.named(request, asked)
                elif asked[1]:
                    found = source.below(*asked)
                else:
                    found = source.root(request, self._highest)
                asked = steps.send(found)
        except StopIteration as ended:
            done: GrownT = ended.value
            return done

    def _drafting(self, request: DraftRequest) -> RowSteps[DraftTree]:
        """Grow a draft, and keep its rows if a rule reads them."""
        source, keeps, kept = self.source, self._keeps(request), None
        points = self._sampling == "argmax" or request.params.is_greedy
        names = points and self._plans is not None and (not keeps or source.rows_by_depth)
        depth, choice = self._planned_depth(request, names=names)
        tree = None if depth else DraftTree()
        source.expect(min(depth, request.max_depth))
        if names and depth:
            assert self._plans is not None
            named = yield self._plans.of(depth)
            if named is not None:
                tree = self._named_tree(named, depth, request, choice)
        if tree is not None and not keeps:
            return tree
        if keeps and source.rows_by_depth:
            kept = KeptRows(self._row_memory, DepthNodes(), copies=True)
            kept.take(ROOT, source.depth_rows(request))
        draft = self._new_draft(request, points=points, keeps=keeps and kept is None)
        if tree is None:
            steps = self._grown(request, draft, depth, choice, points=points)
            tree = (yield from steps) or DraftTree()
        kept = kept or draft.kept
        return tree if kept is None else kept.of(tree)

    def _planned_depth(
        self, request: DraftRequest, *, names: bool
    ) -> tuple[int, NodeChoice | None]:
        """Return how deep to draft, 0 for nothing, and the plan if it chooses the nodes."""
        plan = self._plan
        if request.max_depth < 1 or request.max_nodes < 1:
            return 0, None
        if plan is None or not (names or isinstance(self._shape, DynamicShape)):
            return self._depth, None
        depth = plan.depth_to_ask()
        if depth is None or (depth and self.source.names_all_depths):
            depth = self._depth
        return depth, plan

    def _keeps(self, request: DraftRequest) -> bool:
        """Return whether a rule reads the rows of the draft."""
        if request.keep == "nothing" or not self.keeps_rows:
            return False
        return request.keep != "points" or self.source.keeps_points

    def _named_tree(
        self, named: NamedChildren, depth: int, request: DraftRequest, choice: NodeChoice | None
    ) -> DraftTree:
        """Return the tree of best tokens that the source named, within the request's limits."""
        assert self._plans is not None
        most, end_tokens = request.max_nodes, request.end_tokens
        if self._is_chain and not end_tokens.isdisjoint(named.tokens):
            # Nothing is drafted below an end token.
            ends = [token in end_tokens for token in named.tokens]
            most = min(most, 1 + ends.index(True))
        return self._plans.tree(named, depth, (request.max_depth, most), choice)

    def _new_draft(self, request: DraftRequest, *, points: bool, keeps: bool) -> Draft:
        params, favourites = self._settings(request.params, points=points)
        draft = Draft(self.source, request, params, points=points, favourites=favourites)
        if keeps:
            draft.kept = KeptRows(self._row_memory, draft, copies=self._copies(request))
        # Rules that weigh distributions read whole rows.
        self._highest = 0 if points or keeps else self._most_highest(request.params)
        return draft

    def _grown(
        self,
        request: DraftRequest,
        draft: Draft,
        depth: int,
        choice: NodeChoice | None,
        *,
        points: bool,
    ) -> RowSteps[DraftTree | None]:
        """Grow a draft of at most so many depths within the limits of request and source."""
        shape = self._shape
        # A rule that reads the row of a leaf needs a cell for it.
        room = draft.room - (draft.kept is not None)
        # The last node of a tree is not evaluated.
        max_depth, most = request.max_depth, min(request.max_nodes, room + 1)
        if most < 1:
            return None
        if isinstance(shape, DynamicShape):
            # It evaluates topk nodes of every depth but the last, more than it keeps.
            max_depth = min(max_depth, depth, 1 + room // shape.topk)
            limited = shape.limited(max_depth, most)
            return (yield from draft.grown(path_probability_steps(limited, self._p_min, choice)))
        topology = shape.limited(max_depth, most)
        sampling = "argmax" if request.params.is_greedy else self._sampling
        if self._is_chain:
            return (yield from self._chain(request, draft, topology, sampling, points=points))
        stop = Threshold(self._p_min) if self._p_min > 0.0 else None
        scheme, start = proposal_scheme(sampling), len(request.tokens)
        return (yield from draft.grown(tree_steps(topology, scheme, request.noise, start, stop)))

    def _chain(
        self,
        request: DraftRequest,
        draft: Draft,
        topology: Topology,
        sampling: TreeSampling,
        *,
        points: bool,
    ) -> RowSteps[DraftTree | None]:
        """Grow a chain, which the plan or a rule's fallback may end."""
        plan, params, start = self._plan, request.params, len(request.tokens)
        if plan is not None:
            # How much is drafted must not change a text from answer to answer.
            points = points and request.keep == "nothing"
            plan.start(points=points, greedy=params.is_greedy)
        fallback = _Fallback(request.fallback, plan) if request.fallback else None
        stop: Stop | None = fallback or plan
        if self._p_min > 0.0:
            stop = Threshold(self._p_min, stop)
        scheme, ends = proposal_scheme(sampling), request.end_tokens
        steps = draft.grown(tree_steps(topology, scheme, request.noise, start, stop, ends))
        tree = yield from steps if fallback is None else fallback.watching(steps)
        return tree if tree is None or plan is None else plan.drafted(tree)

    def _settings(self, params: SamplingParams, *, points: bool) -> tuple[SamplingParams, bool]:
        """Return the settings of distributions, and whether only their favourite is read."""
        # One SamplingParams serves a whole answer: identity shows whether it is still the same.
        if self._known is None or self._known[0] is not params:
            self._known = params, *self._new_settings(params, points=points)
        return self._known[1:]

    def _new_settings(self, params: SamplingParams, *, points: bool) -> tuple[SamplingParams, bool]:
        shape, plan, reads = self._shape, self._plan, self._p_min > 0.0
        if not points:
            return params, False
        if self._is_chain:
            reads = reads or (plan is not None and plan.is_threshold)
            favourites = not (reads or self.source.few_tokens)
            if favourites and (params.is_greedy or plan is None):
                return params if params.is_greedy else params.favourites(), True
            if not params.is_greedy:
                return params, False
        # A fixed shape needs the order of tokens alone; path probabilities and p_min the
        # distribution.
        only_order = isinstance(shape, Topology) and not reads
        ranked = shape.max_width if only_order else max(RANKED_TOKENS, shape.max_width)
        return ranking_params(params, ranked), False

    def _copies(self, request: DraftRequest) -> bool:
        """Return whether the rows of all nodes are to outlive the draft, not only the latest.

        A draw contains its distribution; so does, at temperature 0, the token that was drafted, but
        for heads, which rank tokens without penalties. In chains and whole fixed trees all
        evaluated nodes but the latest have children.
        """
        chosen = self._sampling == "argmax" and not request.params.is_greedy
        is_whole = isinstance(self._shape, Topology) and self._p_min == 0.0
        has_children = is_whole or self._is_chain
        ranks = self.source.names_trees
        return request.keep == "rows" or chosen or ranks or not has_children

    def _most_highest(self, params: SamplingParams) -> int:
        """Return how many of the highest logits suffice instead of whole rows; 0 if none do."""
        if not 0 < params.top_k <= _MOST_HIGHEST or not params.is_plain:
            return 0
        if params.logit_bias or params.has_penalties:
            return 0
        # One more than top-k keeps: if it is the last one's equal, ids decide between them.
        return params.top_k + 1 if params.top_k < self.source.most_highest else 0

    def expanded(self, request: DraftRequest, depth: int, topk: int) -> GrownTree:
        """Return all nodes that a dynamic tree looks at (`trees.eagle2`)."""
        params, _ = self._settings(request.params, points=True)
        self._highest = 0
        draft = Draft(self.source, request, params, points=True)
        grown = self._alone(draft.grown(expansion_steps(depth, topk)), request)
        return GrownTree() if grown is None else grown

    # -- drafts of several conversations -----------------------------------------------------------

    def prepare(self, request: DraftRequest) -> bool:
        """Draft a step further, its evaluation made with those of other conversations."""
        if self._steps is None or self._request is not request:
            if not self.source.waits:
                return True
            self._request, self._steps = request, self._drafting(request)
            return self._go_on(next, self._steps)
        found = self.source.result()
        return found is not None and self._go_on(self._steps.send, found)

    def _go_on(self, step: Callable[[Any], Asked], given: object) -> bool:
        """Take a step, and request the evaluation it needs; return whether the draft is whole."""
        assert self._request is not None
        assert self._steps is not None
        try:
            asked = step(given)
            while True:
                found = None
                if self.source.submit(self._request, asked):
                    # Nobody waits for rows that are there already.
                    found = self.source.result()
                    if found is None:
                        break
                asked = self._steps.send(found)
        except StopIteration as drafted:
            self._steps, self._prepared = None, drafted.value
            return True
        except BaseException:
            self._steps = None
            raise
        return False

    def _take_prepared(self, request: DraftRequest) -> DraftTree | None:
        """Return the draft that was prepared for this request, if one was, and forget it."""
        prepared, self._prepared, self._steps = self._prepared, None, None
        return prepared if self._request is request else None

    # -- the text ----------------------------------------------------------------------------------

    def take_target(self, target: TargetModel) -> None:
        """Pass on."""
        self.source.take_target(target)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer: keep the state of the prompt's common part with the last text."""
        self._withdraw()
        self.source.begin(tokens)
        if self._plan is not None:
            self._plan.begin(alike=self.begins_alike)

    def take_over(self, other: Drafter, length: int) -> int:
        """Pass on."""
        if not isinstance(other, GrowingDrafter):
            return 0
        return self.source.take_over(other.source, length)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on."""
        self.source.learn_prompt(start, rows, count)

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Pass on."""
        self.source.read_along(tokens, end)

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the source keep accepted tokens, and the plan learn how much pays."""
        self.source.observe(outcome)
        if self._plan is not None:
            self._plan.observe(outcome)

    def rewind(self, length: int) -> None:
        """Forget the state of tokens that were only guesses."""
        self._withdraw()
        self.source.rewind(length)

    def _withdraw(self) -> None:
        """Forget a draft that was begun with others'."""
        self._steps = self._prepared = None
        if self.source.shared is not None:
            self.source.shared.withdraw()

    @property
    def native_seconds(self) -> float:
        """Time inside the evaluations of this conversation."""
        return self.source.native_seconds

    def close(self) -> None:
        """Free the source's native memory."""
        self._withdraw()
        self.source.close()


def check_p_min(p_min: float) -> None:
    """Raise OptionError unless `p_min` is a probability."""
    if not 0.0 <= p_min <= 1.0:
        raise OptionError(f"p_min is {p_min}: it is a probability, between 0 and 1")
