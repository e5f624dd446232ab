"""One drafter that grows: chains and trees of every method, token by token and depth by depth.

A method is a `Source`: it returns rows of logits after nodes. All else is here, once: sampling
schemes, the stops of p_min and of a plan, grammar, penalties, the rows that rules read, limits of
depth and nodes, and steps that several conversations evaluate together. A chain is a tree of width
1. Static shapes grow as in `trees.growth`, dynamic ones (EAGLE-2) as in `trees.eagle2`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.compiled import LOOPS, DrawnSiblings, RowSource
from specrun.runtime.drafters.adaptive_exit import AdaptiveExit
from specrun.runtime.drafters.kept_rows import DepthNodes, KeptRows, RowMemory
from specrun.runtime.drafters.source import Asked, NodeRows, Source
from specrun.runtime.heads import ShapePlans, TreePlan
from specrun.runtime.laws.law import SHORT, Law, RankedLaw
from specrun.runtime.laws.noise import draws_of
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import (
    Logits,
    greedy_token,
    lead,
    log_probability,
    penalty_window,
    transformed_law,
    transformed_laws,
)
from specrun.runtime.planning import DraftPlan
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees.eagle2 import (
    DynamicShape,
    GrownTree,
    check_sampling,
    expansion_steps,
    path_probability_steps,
)
from specrun.runtime.trees.growth import (
    Steps,
    Stop,
    Threshold,
    TreeSampling,
    ending_at,
    proposal_scheme,
    tree_steps,
)
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree

RANKED_TOKENS = 40
"""Tokens among which point masses are chosen if the settings do not truncate."""

_MOST_HIGHEST = 128  # logits that a graph ranks for draws: more are looked for in whole rows

Plan = DraftPlan | AdaptiveExit
"""How much is drafted: nodes that pay, or a chain as long as its threshold allows."""

# == One draft: the distributions after its nodes ==================================================

GrownT = TypeVar("GrownT")
RowSteps = Generator[Asked, Any, GrownT]
"""A draft that grows: yields what to evaluate, and receives rows or named children, or None."""


class _Favourite(RankedLaw):
    """The most likely token of a row, chosen without a distribution."""

    __slots__ = ("_row", "_token")
    _row: Logits
    _token: int

    def __init__(self, row: Logits, token: int) -> None:
        object.__setattr__(self, "_row", row)
        object.__setattr__(self, "_token", token)

    def best(self, count: int) -> list[tuple[int, float]]:
        """Return the token; its probability is not worked out."""
        return [(self._token, 1.0)]

    @property
    def most_likely(self) -> tuple[int, float]:
        """The token, and its probability among it and the second one."""
        return self._token, lead(self._row, self._token)


class Draft:
    """A draft in the making: its evaluated nodes, and the distributions after them.

    Ranked tokens are a distribution as they are; rows of logits are transformed by `params`, whose
    penalties see each node's own path. `points`: tokens are chosen, not drawn. `favourites`: only
    the most likely token is read. `kept` keeps the rows if a rule reads them.
    """

    def __init__(
        self,
        source: Source,
        request: DraftRequest,
        params: SamplingParams,
        *,
        points: bool,
        favourites: bool = False,
    ) -> None:
        self._source, self._request, self._params = source, request, params
        self._points, self._favourites = points, favourites
        self._start = len(request.tokens)
        self._parents: list[int] = []  # of all evaluated nodes
        self._tokens: list[int] = []
        self.room = source.room(request.tokens)
        self.kept: KeptRows | None = None

    def grown(self, steps: Steps[GrownT], rows: NodeRows | None = None) -> RowSteps[GrownT | None]:
        """Let steps receive distributions of rows; return their result, None without any row.

        `rows` are those of the root, if it was evaluated before.
        """
        try:
            parents, tokens = next(steps)
            while True:
                found = (yield parents, tokens) if rows is None else rows
                if found is None:
                    return None
                laws = self.laws(self.add(parents, tokens, found), found)
                rows = None
                parents, tokens = steps.send(laws)
        except StopIteration as ended:
            done: GrownT = ended.value
            return done

    def add(self, parents: Sequence[int], tokens: Sequence[int], rows: NodeRows) -> int:
        """Note nodes that were evaluated just now; return the number of the first."""
        first = len(self._tokens) if tokens else ROOT
        self._parents += parents
        self._tokens += tokens
        if self.kept is not None:
            self.kept.take(first, _whole(rows))
        return first

    def laws(self, first: int, rows: NodeRows) -> list[Law]:
        """Return the distributions after nodes from number `first` on, by their rows."""
        if rows.ranked is not None and self._points:
            return list(RankedLaw.of_rows(rows.ranked.tokens, rows.ranked.log_probs))
        params, state = self._params, self._request.state
        if rows.highest is not None:
            return rows.highest.laws(without_penalties(params))
        whole = _whole(rows)
        if not self._favourites and not params.has_penalties:
            return transformed_laws([*whole], params, state)
        windows = [self._window(node) for node in range(first, first + len(whole))]
        pairs = list(zip(whole, windows, strict=True))
        if self._favourites:
            return [_Favourite(row, greedy_token(row, params, own, state)) for row, own in pairs]
        return [transformed_law(row, params, window, state) for row, window in pairs]

    def _window(self, node: int) -> Sequence[int]:
        """Return the text that penalties see at a node: that of the target's distribution there."""
        if not self._params.has_penalties:
            return ()
        path: list[int] = []
        while node != ROOT:
            path.append(self._tokens[node])
            node = self._parents[node]
        return penalty_window(self._request.tokens, path[::-1], self._params)

    # -- its nodes, for rules that read rows (`kept_rows.EvaluatedNodes`) --------------------------

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the evaluated node of a token below another, None if none is."""
        for node, named in enumerate(zip(self._parents, self._tokens, strict=True)):
            if named == (parent, token):
                return node
        return None

    def leaf(self, parent: int, token: int) -> tuple[int, Logits] | None:
        """Evaluate a token below a node."""
        if len(self._tokens) >= self.room:
            return None
        rows = self._source.below([parent], [token])
        if rows is None:
            return None
        self._parents.append(parent)
        self._tokens.append(token)
        return len(self._tokens) - 1, _whole(rows)[0]

    def root(self) -> Logits | None:
        """Evaluate the text of the draft, which may have grown since."""
        if self.room < 0:
            return None
        text = self._request.tokens[: self._start]
        rows = self._source.root(dataclasses.replace(self._request, tokens=text), 0)
        return None if rows is None else _whole(rows)[0]


def _whole(rows: NodeRows) -> Sequence[Logits]:
    """Return whole rows; raises `OptionError` of a head that was not opened for them."""
    if rows.whole is None:
        raise OptionError("heads that are drawn from must be opened with whole rows")
    return rows.whole


class _DrawnTree(NamedTuple):
    """A tree that compiled code grows: tokens, parents, and siblings by their parents."""

    tokens: list[int]
    parents: list[int]
    siblings: DrawnSiblings


def drawn_steps(
    draft: Draft, topology: Topology, request: DraftRequest
) -> RowSteps[DraftTree | None]:
    """Draw a tree without replacement in compiled code: the one of `tree_steps`.

    Only if it `can_draw`. Return None if there are no rows.
    """
    params, loops, k = request.params, LOOPS, request.params.cuts[0]
    assert loops is not None
    rows = yield (), ()
    if rows is None:
        return None
    if _entries(rows, k) is None:  # rows that top-k does not cut
        scheme = proposal_scheme("without")
        steps = tree_steps(topology, scheme, request.noise, len(request.tokens))
        return (yield from draft.grown(steps, rows))
    children, first = topology.children, draft.add((), (), rows)
    scratch, cuts, tree = np.empty(k), (np.exp, *params.cuts[1:]), _DrawnTree([], [], {})
    level = [children[ROOT]], [ROOT], ROOT
    for position in range(len(request.tokens), len(request.tokens) + topology.max_depth):
        draws, entries = draws_of(request.noise, position, 1), _entries(rows, k)
        assert entries is not None
        drawn = loops.drawn_depth(*entries, level, children, draws, scratch, cuts, tree)
        if drawn is None:
            draft.laws(first, rows)  # raises, and names the broken row
            raise AssertionError("rows that are laws to Python alone")
        places, nodes, parents, tokens = drawn
        if not tokens:
            break
        rows = yield parents, tokens
        assert rows is not None
        first = draft.add(parents, tokens, rows)
        level = places, nodes, first
    return DraftTree.of_siblings((*tree.tokens,), (*tree.parents,), tree.siblings)


def can_draw(request: DraftRequest) -> bool:
    """Return whether compiled code draws from the distributions of these settings."""
    params = request.params
    few = params.is_cut and not params.is_greedy and params.cuts[0] <= SHORT
    return LOOPS is not None and few and request.state.grammar is None


def _entries(rows: NodeRows, k: int) -> tuple[RowSource, npt.NDArray[np.int32] | None] | None:
    """Return rows and their entries' names, if any; None for rows of not more than k entries."""
    if rows.highest is not None:
        return rows.highest.logits.data, rows.highest.tokens
    whole = _whole(rows)
    return None if len(whole[0]) <= k else (whole.__getitem__, None)


# == The drafter ===================================================================================


class _Fallback:
    """Ends a chain if the model's largest raw probability is below `least` (BiLD's fallback).

    It takes the place of a plan, but not of a threshold.
    """

    def __init__(self, least: float, plan: Plan | None) -> None:
        self._least, self._is_sure = least, True
        self._exit = plan if isinstance(plan, AdaptiveExit) else None

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
        self.keeps_rows, self.waits = source.keeps_rows, source.shares
        self.embedding_inputs = source.embedding_inputs
        self._shape, self._sampling, self._p_min = shape, sampling, p_min
        self._is_chain = isinstance(shape, Topology) and shape.n_leaves == 1
        self._depth = shape.depth if isinstance(shape, DynamicShape) else shape.max_depth
        self._plans: ShapePlans | None = None
        if source.names_trees and self._depth:
            self._plans = ShapePlans(shape, has_values=plan is not None)
        self._highest = 0
        self._row_memory = RowMemory()
        # Settings that rank tokens, by the identity of an answer's settings.
        self._ranking: tuple[SamplingParams, SamplingParams] | None = None
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
        whole = self._whole_draft(request)
        return self._alone(self._drafting(request), request) if whole is None else whole

    def _whole_draft(self, request: DraftRequest) -> DraftTree | None:
        """Return a draft of compiled code; None if stops or rules look at rows."""
        shape, source = self._shape, self.source
        if self._p_min > 0.0 or self._plan is not None or isinstance(shape, DynamicShape):
            return None
        if request.keep != "nothing" or request.fallback or source.waits:
            return None
        topology = shape.limited(request.max_depth, request.max_nodes)
        return source.whole(request, topology, self._sampling) if topology.parents else None

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
        points, source = self._sampling == "argmax" or request.params.is_greedy, self.source
        params, favourites = self._settings(request.params, points=points)
        draft = Draft(source, request, params, points=points, favourites=favourites)
        keeps = request.keep != "nothing" and self.keeps_rows
        keeps = keeps and (request.keep != "points" or source.keeps_points)
        if keeps and not source.rows_by_depth:
            draft.kept = KeptRows(self._row_memory, draft, copies=self._copies(request))
        whole = points or keeps  # rules that weigh distributions read whole rows
        self._highest = 0 if whole else self._most_highest(request.params)
        tree = (yield from self._grown(request, draft, points=points)) or DraftTree()
        if keeps and source.rows_by_depth:
            draft.kept = KeptRows(self._row_memory, DepthNodes(), copies=True)
            draft.kept.take(ROOT, source.depth_rows(request))
        return tree if draft.kept is None else draft.kept.of(tree)

    def _grown(
        self, request: DraftRequest, draft: Draft, *, points: bool
    ) -> RowSteps[DraftTree | None]:
        """Grow a draft within the limits of request and source; None for nothing."""
        shape, plan = self._shape, self._plan
        # A rule that reads the row of a leaf needs a cell for it.
        room = draft.room - (draft.kept is not None)
        # The last node of a tree is not evaluated.
        max_depth, most = request.max_depth, min(request.max_nodes, room + 1)
        if max_depth < 1 or most < 1:
            return None
        at_once = points and self._p_min == 0.0 and draft.kept is None and self._plans is not None
        depth, choice = self._depth, None
        if isinstance(plan, DraftPlan) and (at_once or isinstance(shape, DynamicShape)):
            choice, asked = plan, plan.depth_to_ask()
            if not asked:
                return None
            depth = depth if self.source.names_all_depths else min(depth, asked)
        if at_once:
            assert self._plans is not None
            named = yield self._plans.of(depth)
            if named is not None:
                if self._is_chain:
                    most = min(most, _before_end(named.tokens, request.end_tokens))
                return self._plans.tree(named, depth, (max_depth, most), choice)
        if isinstance(shape, DynamicShape):
            # It evaluates topk nodes of every depth but the last, more than it keeps.
            max_depth = min(max_depth, depth, 1 + room // shape.topk)
            limited = shape.limited(max_depth, most)
            return (yield from draft.grown(path_probability_steps(limited, self._p_min, choice)))
        topology = shape.limited(max_depth, most)
        sampling = "argmax" if request.params.is_greedy else self._sampling
        if sampling == "without" and self._p_min == 0.0 and plan is None and can_draw(request):
            return (yield from drawn_steps(draft, topology, request))
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
        if isinstance(plan, AdaptiveExit):
            plan.start(greedy=params.is_greedy)
        elif plan is not None:
            # How much is drafted must not change a text from answer to answer.
            plan.start(points=points and request.keep == "nothing")
        fallback = _Fallback(request.fallback, plan) if request.fallback else None
        stop: Stop | None = fallback or plan
        if self._p_min > 0.0:
            stop = Threshold(self._p_min, stop)
        scheme = ending_at(request.end_tokens, proposal_scheme(sampling))
        steps = draft.grown(tree_steps(topology, scheme, request.noise, start, stop))
        tree = yield from steps if fallback is None else fallback.watching(steps)
        return tree if tree is None or plan is None else plan.drafted(tree)

    def _settings(self, params: SamplingParams, *, points: bool) -> tuple[SamplingParams, bool]:
        """Return the settings of distributions, and whether only their favourite is read."""
        shape, plan = self._shape, self._plan
        if not points:
            return params, False
        reads = self._p_min > 0.0
        if self._is_chain:
            reads = reads or isinstance(plan, AdaptiveExit)
            favourites = not (reads or self.source.names_few)
            if favourites and (params.is_greedy or plan is None):
                return params if params.is_greedy else params.favourites(), True
            if not params.is_greedy:
                return params, False
        if self._ranking is None or self._ranking[0] is not params:
            # A fixed shape needs the order of tokens alone; path probabilities and p_min the law.
            only_order = isinstance(shape, Topology) and not reads
            ranked = shape.max_width if only_order else max(RANKED_TOKENS, shape.max_width)
            self._ranking = params, ranking_params(params, ranked)
        return self._ranking[1], False

    def _copies(self, request: DraftRequest) -> bool:
        """Return whether the rows of all nodes are to outlive the draft, not only the latest.

        A draw contains its distribution; so does, at temperature 0, the token that was drafted. In
        chains and whole fixed trees all evaluated nodes but the latest have children.
        """
        chosen = self._sampling == "argmax" and not request.params.is_greedy
        is_whole = isinstance(self._shape, Topology) and self._p_min == 0.0
        return request.keep == "rows" or chosen or not (is_whole or self._is_chain)

    def _most_highest(self, params: SamplingParams) -> int:
        """Return how many of the highest logits say as much as whole rows; 0 if none do."""
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
        found = self.source.answer()
        return found is not None and self._go_on(self._steps.send, found)

    def _go_on(self, step: Callable[[Any], Asked], given: object) -> bool:
        """Take a step, and request the evaluation it needs; return whether the draft is whole."""
        assert self._request is not None
        assert self._steps is not None
        try:
            asked = step(given)
            while not self.source.ask(self._request, asked):
                asked = self._steps.send(None)
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

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer: keep the state of what the prompt shares with the last text."""
        self._steps = self._prepared = None
        self.source.begin(tokens)
        if self._plan is not None:
            self._plan.begin()

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on."""
        self.source.learn_prompt(start, rows, count)

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Pass on."""
        self.source.read_along(tokens, end)

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the source keep what was accepted, and the plan learn how much pays."""
        self.source.observe(outcome)
        if self._plan is not None:
            self._plan.observe(outcome)

    def rewind(self, length: int) -> None:
        """Forget the state of tokens that were only guesses."""
        self.source.rewind(length)

    @property
    def native_seconds(self) -> float:
        """Time inside the evaluations of this conversation."""
        return self.source.native_seconds

    @property
    def n_params(self) -> int:
        """The parameters of the source's models."""
        return self.source.n_params

    @property
    def depth_params(self) -> float:
        """The parameters that a depth of a draft multiplies."""
        return self.source.depth_params

    def close(self) -> None:
        """Free the source's native memory."""
        self.source.close()


def _before_end(tokens: Sequence[int], ends: frozenset[int]) -> int:
    """Return the length of a chain that stops behind an end token."""
    if ends.isdisjoint(tokens):
        return len(tokens)
    return 1 + next(place for place, token in enumerate(tokens) if token in ends)


def without_penalties(params: SamplingParams) -> SamplingParams:
    """Return the settings that cut and temper, without those that name tokens."""
    if not (params.has_penalties or params.logit_bias):
        return params
    off = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return params.replace(logit_bias={}, grammar=None, **off)


def check_p_min(p_min: float) -> None:
    """Raise OptionError unless `p_min` is a probability."""
    if not 0.0 <= p_min <= 1.0:
        raise OptionError(f"p_min is {p_min}: it is a probability, between 0 and 1")


def ranking_params(params: SamplingParams, ranked: int) -> SamplingParams:
    """Return the settings that rank the `ranked` most likely tokens.

    Greedy settings make a law of one token, which ranks nothing and is always certain: temperature
    1 takes their place. Otherwise the ranking keeps the target's truncation: tokens that it can
    never emit are not worth a node.
    """
    if params.is_greedy:
        return params.replace(temperature=1.0, top_k=ranked, top_p=1.0, min_p=0.0, mirostat=0)
    # top_k = 0 is no cut.
    return params.replace(top_k=min(params.top_k or ranked, ranked))
