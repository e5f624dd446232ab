"""A draft model drafts a chain (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from specrun.bindings.errors import OptionError
from specrun.runtime.compiled import draws_of
from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.drafters.kept_rows import ChainRows, RowMemory, copies_rows
from specrun.runtime.drafters.path_laws import RANKED_TOKENS, check_p_min, ranking_params
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import (
    Logits,
    greedy_token,
    lead,
    log_probability,
    penalty_window,
    transformed_law,
)
from specrun.runtime.planning import DraftPlan
from specrun.runtime.planning.theory import multiplications
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees import chain_steps
from specrun.runtime.trees.tree import DraftTree

# == Drafters with a model of their own ============================================================
#
# A `ContextDrafter` owns a context, a `ModelDrafter` has the target's tokens read in it, and a
# `SteppedDrafter` drafts step by step, so that the steps of several conversations are one
# evaluation.


_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


class ContextDrafter(Drafter):
    """Owns a context of a draft model."""

    def __init__(self, state: DraftModelState, *, name: str) -> None:
        self.name = name
        self._context = state.context
        self._model_state = state

    @property
    def native_seconds(self) -> float:
        """Time inside the draft model's evaluations."""
        return self._context.native_seconds

    @property
    def n_params(self) -> int:
        """The draft model's parameters."""
        return self._context.model.n_params

    @property
    def depth_params(self) -> float:
        """The draft model's."""
        return multiplications(self._context.model)

    def close(self) -> None:
        """Free the context."""
        self._model_state.close()


class ModelDrafter(ContextDrafter):
    """Reads the target's tokens; `p_min` ends drafts where the model is less certain."""

    def __init__(self, state: DraftModelState, *, p_min: float, name: str) -> None:
        check_p_min(p_min)
        super().__init__(state, name=name)
        self._p_min = p_min

    def has_room(self, tokens: Sequence[int]) -> bool:
        """Whether the model can read a text of which it has cached a beginning."""
        return self._model_state.room(tokens) >= 0

    def row_after(self, tokens: Sequence[int]) -> Logits:
        """Return the model's own logits after all tokens of the text, a view [shared vocab]."""
        state = self._model_state
        state.rewind(min(len(state.cached), len(tokens) - 1))  # the last token's row is needed
        return state.feed(tokens[len(state.cached) :])

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one."""
        self._model_state.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on: a cache may be chosen by the target's states."""
        self._model_state.learn_prompt(start, rows, count)

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Read the prompt piece by piece."""
        self._model_state.read_along(tokens, end)

    def rewind(self, length: int) -> None:
        """Drop the cache of tokens that were only guesses."""
        self._model_state.rewind(min(length, len(self._model_state.cached)))


class SteppedDrafter(ModelDrafter, Generic[_Asked, _Found]):
    """Makes a draft step by step: alone, or each step beside those of other conversations.

    A step is the evaluation that is `_Asked` for; the draft goes on with what was `_Found`.
    """

    def __init__(self, state: DraftModelState, *, p_min: float, name: str) -> None:
        super().__init__(state, p_min=p_min, name=name)
        self.waits = state.shares_context
        # A draft in the making, for which request, and the tree that came of it.
        self._steps: Generator[_Asked, _Found, DraftTree] | None = None
        self._request: DraftRequest | None = None
        self._prepared: DraftTree | None = None

    @abstractmethod
    def _drafting(self, request: DraftRequest) -> Generator[_Asked, _Found, DraftTree]:
        """Draft: yields what to evaluate, and takes what was found."""

    @abstractmethod
    def _ask(self, asked: _Asked) -> None:
        """Ask for an evaluation that is made with those of other conversations."""

    @abstractmethod
    def _answer(self) -> _Found | None:
        """Return what the evaluation found; None before it was made."""

    def prepare(self, request: DraftRequest) -> bool:
        """Draft a step further, its evaluation made with those of other conversations."""
        if self._steps is None or self._request is not request:
            if not self._model_state.waits:
                return True
            self._request, self._steps = request, self._drafting(request)
            return self._go_on(next, self._steps)
        found = self._answer()
        return found is not None and self._go_on(self._steps.send, found)

    def _go_on(self, step: Callable[[Any], _Asked], given: object) -> bool:
        """Take a step, and ask for what it needs; return whether the draft is complete."""
        try:
            self._ask(step(given))
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

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one, and no draft."""
        super().begin(tokens)
        self._steps = self._prepared = None


# == Draft & Verify's adaptive exit: a confidence threshold learnt from acceptance =================
#
# Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
# Decoding" (2023), section 3.4: a draft ends where the drafter is less sure than a threshold; after
# each round the threshold moves so that the share of accepted tokens tends to a target. Constants
# are those of the authors' program.


_GREEDY_START, _SAMPLED_START = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class AdaptiveExitOptions:
    """The rule's constants: `acceptance` (alpha), `step` (epsilon) and `beta1`, `beta2`.

    `start` is the first threshold; None means 0.8 at temperature 0 and 0.5 above.
    """

    start: float | None = None
    acceptance: float = 0.9
    step: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9

    def __post_init__(self) -> None:
        for name in ("start", "acceptance", "step", "beta1", "beta2"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise OptionError(f"p_min=adaptive: {name} is {value}: it must be between 0 and 1")


class AdaptiveExit:
    """The threshold of one answer. It knows only rounds that are over, so that drafts stay exact.

    The authors look at the drawn token's own probability and keep the token; here the greatest
    probability of the law is read before anything is drawn from it. The first token of a round is
    always drafted, as theirs is: a round without a draft would teach nothing, and a threshold that
    is too high would stay.
    """

    def __init__(self, options: AdaptiveExitOptions | None = None) -> None:
        self._options = options or AdaptiveExitOptions()
        self._threshold: float | None = None
        self._acceptance = 0.0

    def begin(self) -> None:
        """Forget everything: each answer starts alike, so that a seed gives the same text again."""
        self._threshold = None
        self._acceptance = 0.0

    def threshold(self, *, greedy: bool) -> float:
        """Return how sure the drafter must be to draft on."""
        if self._threshold is None:
            usual = _GREEDY_START if greedy else _SAMPLED_START
            start = self._options.start
            self._threshold = usual if start is None else start
        return self._threshold

    def learn(self, drafted: int, accepted: int, *, most: int) -> None:
        """Move the threshold after a round that drafted so many tokens of at most `most`.

        AR <- b1 AR + (1 - b1) accepted / drafted; then the threshold moves by a share 1 - b2 of
        epsilon: up where AR is below alpha, else down, unless the draft was as long as it may be.
        """
        # Rounds without a draft say nothing of acceptance.
        if drafted < 1 or self._threshold is None:
            return
        options, beta1 = self._options, self._options.beta1
        # Section 3.4's smoothed rate; its beta1 weighs the past.
        self._acceptance = beta1 * self._acceptance + (1 - beta1) * accepted / drafted
        if self._acceptance < options.acceptance:
            wanted = self._threshold + options.step
        # A draft that ran to its limit did not stop by the
        # threshold: lowering it would change nothing.
        elif drafted < most:
            wanted = self._threshold - options.step
        else:
            return
        moved = options.beta2 * self._threshold + (1 - options.beta2) * wanted
        self._threshold = min(1.0, max(0.0, moved))


# == Chains (Leviathan et al. 2023; Chen et al. 2023) ==============================================


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
        length: DraftPlan | None = None,
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
        if self._length is not None:
            self._length.drafted(tree)
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
        if self._length is not None:
            self._length.drafted(tree)
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
            self._length.observe(outcome)
        self._drafted = ()
        self._state.rewind(base + common_prefix(self._state.cached[base:], outcome.tokens[base:]))
