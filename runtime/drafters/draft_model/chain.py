"""A small model of the same vocabulary drafts a chain (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Literal

from specrun.bindings.errors import OptionError
from specrun.runtime.costs.draft_length import DraftLength
from specrun.runtime.drafter import DraftRequest, RoundOutcome
from specrun.runtime.drafters.draft_model.adaptive_exit import AdaptiveExit
from specrun.runtime.drafters.draft_model.model_drafter import SteppedDrafter
from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.drafters.kept_rows import ChainRows, RowMemory, copies_rows
from specrun.runtime.law import Law
from specrun.runtime.noise import draws_of
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.text import common_prefix
from specrun.runtime.transform import (
    Logits,
    greedy_token,
    lead,
    log_probability,
    penalty_window,
    transformed_law,
)
from specrun.runtime.tree import DraftTree
from specrun.runtime.trees import RANKED_TOKENS, chain_steps, ranking_params

DraftSampling = Literal["with", "argmax"]

_Steps = Generator[Sequence[int], Logits, DraftTree]
"""A draft in the making: says which tokens to evaluate, and is given the row after them."""


class _Fallback:
    """Ends a chain where the model's largest raw probability is below `least` (BiLD's fallback)."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._is_sure = True

    def reads(self, row: Logits) -> None:
        """Look at the row of the next token, before anything is drawn from it."""
        self._is_sure = log_probability(row, int(row.argmax())) >= math.log(self._least)

    def goes_on(self) -> bool:
        """Say that the next row may be evaluated: it costs little, and decides."""
        return True

    def takes(self, sureness: float) -> bool:
        """Return whether the next token is drafted, whatever the transformed law says."""
        return self._is_sure


class DraftModelDrafter(SteppedDrafter[Sequence[int], Logits]):
    """Drafts up to `num_draft_tokens` tokens in a row with a model of its own.

    `sampling` "with" draws each token from the drafter's own law, transformed like the target's,
    and stores that law: acceptance is then min(1, p/q). "argmax" takes its most likely token as a
    point mass: better where the models are peaked, and the text stays plain decoding's own at every
    temperature. The chain ends early when the drafter's most likely token has probability below
    `p_min`: the law is read before the draw, so exactness holds. At temperature 0 that is its
    probability at temperature 1. With `adaptive_exit` the threshold is Draft & Verify's, which
    learns, instead of `p_min`. With `length` a chain is as long as it pays, `num_draft_tokens` at
    most.
    """

    keeps_rows = True

    def __init__(
        self,
        state: DraftModelState,
        *,
        num_draft_tokens: int = 5,
        sampling: DraftSampling = "with",
        p_min: float = 0.0,
        adaptive_exit: AdaptiveExit | None = None,
        length: DraftLength | None = None,
        name: str = "draft",
    ) -> None:
        if num_draft_tokens < 1:
            raise OptionError(
                f"n is {num_draft_tokens}: a draft model must draft at least 1 token (or use none)"
            )
        self._state = state
        super().__init__(self._state, p_min=p_min, name=name)
        self._row_memory = RowMemory()
        self.max_nodes, self._sampling = num_draft_tokens, sampling
        self._exit, self._length = adaptive_exit, length
        self._looks_at_rows = p_min > 0.0 or adaptive_exit is not None or length is not None
        self._drafted: Sequence[int] = ()
        self._most = 0

    def _ask(self, asked: Sequence[int]) -> None:
        self._state.ask(asked)

    def _answer(self) -> Logits | None:
        return self._state.answer()

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; shorter where the drafter's own context ends or `p_min` stops it."""
        if self._request is not None:  # one was asked for with others'
            prepared = self._take_prepared(request)
            if prepared is not None:
                return prepared
        chain = self._compiled_chain(request)
        if chain is not None:
            return chain
        steps, state = self._drafting(request), self._state
        try:
            row = state.feed(next(steps))
            while True:  # where a window moves, it does so before the draft, never within it
                row = state.feed_one(steps.send(row)[0])
        except StopIteration as drafted:
            tree: DraftTree = drafted.value
            return tree

    def _compiled_chain(self, request: DraftRequest) -> DraftTree | None:
        """Draft in compiled code, from a single token on; None where rows are looked at here."""
        state, params = self._state, request.params
        if self._looks_at_rows or request.keep != "nothing" or request.fallback or state.waits:
            return None
        if params.is_greedy:
            if not params.is_plain or params.has_penalties or params.logit_bias:
                return None
        elif (
            self._sampling != "with"
            or request.state.grammar is not None
            or not state.can_draw_on(params)
        ):
            return None
        count = self._count(request)
        if count < 2:
            return None
        uncached = self._uncached(request, ())
        if params.is_greedy:
            return DraftTree.chain(self._likeliest(request, uncached, count))
        return self._drawn(request, uncached, count)

    def _likeliest(self, request: DraftRequest, uncached: Sequence[int], count: int) -> list[int]:
        """Return the most likely tokens in turn."""
        state, params, ends = self._state, request.params, request.end_tokens
        tokens = None
        if len(uncached) == 1 and state.feeds_plainly:
            tokens = state.feed_likeliest(uncached[0], count, ends)
        if tokens is None:
            tokens = [greedy_token(state.feed(uncached), params)]
            if tokens[0] not in ends:
                tokens += state.feed_likeliest(tokens[0], count - 1, ends) or ()
        while len(tokens) < count and tokens[-1] not in ends:  # compiled code cannot
            tokens.append(greedy_token(state.feed_one(tokens[-1]), params))
        return tokens

    def _drawn(self, request: DraftRequest, uncached: Sequence[int], count: int) -> DraftTree:
        """Draw tokens in turn, as `chain_steps` does."""
        state, token = self._state, None
        if len(uncached) == 1 and state.feeds_plainly and state.known(uncached[0]) == uncached[0]:
            token = uncached[0]
        else:
            state.feed(uncached)
        draws = draws_of(request.noise, len(request.tokens), count)
        return state.feed_drawn(token, draws, request.params, request.end_tokens)

    def _count(self, request: DraftRequest) -> int:
        """Return how many tokens may be drafted; the last token's row is needed again."""
        state = self._state
        state.rewind(min(len(state.cached), len(request.tokens) - 1))
        # The last drafted token is fed back only for a rule that reads its row: else it needs no
        # cell.
        room = state.room(request.tokens) + (request.keep == "nothing")
        return min(self.max_nodes, request.max_depth, request.max_nodes, room)

    def _drafting(self, request: DraftRequest) -> _Steps:
        """Draft a chain: yields tokens to evaluate after the cached ones, takes the row then."""
        start, rows, count = len(request.tokens), self._kept_rows(request), self._count(request)
        if count < 1:
            return DraftTree() if rows is None else rows.of(DraftTree())
        params, threshold = request.params, self._p_min
        # The threshold is known before the draw, from earlier rounds alone: exactness needs that.
        # A greedy law is a point mass too: there is nothing to draw, and no law to store.
        points = self._sampling == "argmax" or params.is_greedy
        if self._exit is not None:
            threshold = self._exit.threshold(greedy=params.is_greedy)
        if params.is_greedy and threshold > 0.0:
            params = ranking_params(params, RANKED_TOKENS)  # a greedy law is always certain
        if self._length is not None:
            self._length.start(points=points)
        surely = None if request.fallback == 0.0 else _Fallback(request.fallback)
        if params.is_greedy:
            return (yield from self._greedy_chain(request, count, rows, surely))
        stop = self._length if surely is None else surely
        steps = chain_steps(
            request.noise,
            start,
            most=count,
            points=points,
            threshold=threshold,
            always_first=self._exit is not None,
            stop=stop,
            end_tokens=request.end_tokens,
        )
        tree = yield from self._after_laws(steps, request, params, rows, surely)
        # A draft cut by its end token was as long as it could be, and is no sign of doubt.
        ended = bool(tree.tokens) and tree.tokens[-1] in request.end_tokens
        self._drafted, self._most = tree.tokens, len(tree) if ended else count
        return tree if rows is None else rows.of(tree)

    def _after_laws(
        self,
        steps: Generator[list[int], Law, DraftTree],
        request: DraftRequest,
        params: SamplingParams,
        rows: ChainRows | None,
        surely: _Fallback | None,
    ) -> _Steps:
        """Give the steps of a chain the laws that the model's rows say."""
        drafted = next(steps, None)
        if drafted is None:
            return DraftTree()
        while True:
            row = yield self._uncached(request, drafted)
            if surely is not None:
                surely.reads(row)
            if rows is not None:
                rows.take(len(drafted) - 1, row)
            if params.has_penalties:
                window = penalty_window(request.tokens, drafted, params)
                law = transformed_law(row, params, window, request.state)
            else:
                law = transformed_law(row, params, (), request.state)
            try:
                drafted = steps.send(law)
            except StopIteration as ended:
                tree: DraftTree = ended.value
                return tree

    def _uncached(self, request: DraftRequest, drafted: Sequence[int]) -> Sequence[int]:
        """Return what is to be evaluated next: after a fully accepted draft two tokens at once."""
        return drafted[-1:] if drafted else request.tokens[len(self._state.cached) :]

    def _kept_rows(self, request: DraftRequest) -> ChainRows | None:
        """Return what keeps the rows that the request asks for."""
        if request.keep == "nothing":
            return None
        state, text = self._state, request.tokens
        start = len(text)

        def after(drafted: Sequence[int]) -> Logits | None:
            if state.room(text) < len(drafted):
                return None
            if drafted:
                return state.feed_one(drafted[-1])
            state.rewind(min(len(state.cached), start - 1))
            return state.feed(text[len(state.cached) : start])

        copies = copies_rows(request, points=self._sampling == "argmax")
        return ChainRows(self._row_memory, after, copies=copies)

    def _greedy_chain(
        self, request: DraftRequest, count: int, rows: ChainRows | None, surely: _Fallback | None
    ) -> _Steps:
        """Draft the most likely tokens in turn: without `p_min` they need no laws."""
        params = request.params
        length = self._length if surely is None else surely
        tokens: list[int] = []
        while len(tokens) < count and not (tokens and tokens[-1] in request.end_tokens):
            if length is not None and not length.goes_on():
                break
            row = yield self._uncached(request, tokens)
            if surely is not None:
                surely.reads(row)
            if rows is not None:
                rows.take(len(tokens) - 1, row)
            if params.has_penalties:
                window = penalty_window(request.tokens, tokens, params)
                token = greedy_token(row, params, window, request.state)
            else:
                token = greedy_token(row, params)
            if length is not None and not length.takes(lead(row, token)):
                break
            tokens.append(token)
        self._drafted, self._most = tokens, len(tokens)
        tree = DraftTree.chain(tokens)
        return tree if rows is None else rows.of(tree)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer: keep the cache of what the prompt shares with the last one."""
        super().begin(tokens)
        if self._exit is not None:
            self._exit.begin()
        if self._length is not None:
            self._length.begin()

    def observe(self, outcome: RoundOutcome) -> None:
        """Drop the cache of rejected tokens, keep that of accepted ones; learn when to stop."""
        base = outcome.start
        if self.layer_inputs:
            self._state.learn_round(outcome)
        if self._exit is not None:
            # In an ensemble the path may be another drafter's.
            accepted = common_prefix(self._drafted, outcome.tokens[base : base + len(outcome.path)])
            self._exit.learn(len(self._drafted), accepted, most=self._most)
        if self._length is not None:
            self._length.observe(self._drafted, outcome)
        self._drafted = ()
        self._state.rewind(base + common_prefix(self._state.cached[base:], outcome.tokens[base:]))
