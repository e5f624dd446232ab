"""Drafters whose rounds are timed, and stopped while they do not break even.

A drafter plans with a cost curve (`LiveCurve`), which its rounds correct. Its `Pace` limits the
decisions by measured time:

- timed: the expected cost of evaluations;
- compared: also when to stop (`BreakEven`). A model or heads draft as much as their plan expects
  to pay, and nothing while their loss stands in the account. If costs were not measured, the
  first rounds are plain: all others are compared with them;
- greedy: of a drafter that draws, as compared at temperature 0. Elsewhere a seed's text depends on
  its drafts, which must not depend on earlier times;
- paying: as compared, and how much is drafted. A drafter without a model proposes by estimates of
  acceptance and costs that a text and a machine may belie.

The clock stops only point masses, so the text is plain decoding's own all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specrun.runtime.planning import STALL, START, TRUST, Account, LiveCurve
from specrun.runtime.round.drafter import NOTHING, Drafter, DraftRequest, Pace, Pause, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows, TargetModel
from specrun.runtime.trees.tree import DraftTree

_FIRST, _GROWTH = 3, 4  # nodes of a first draft, and how much wider the next may be


class BreakEven:
    """The length of a drafter's drafts, by its rounds' loss against plain decoding.

    Their loss is booked (`Account`), the drafter's own time included. A draft that is expected to
    gain (by a plan or `Drafter.forecast`) is made while anything may be lost, others as far as all
    of their nodes may be rejected. If not even one fits, the drafter sleeps: a proposal in vain
    takes the time that is being saved up, and may be all that a token allows (a small model, a fast
    machine).
    """

    def __init__(self, costs: LiveCurve) -> None:
        self._costs, self.account = costs, Account()
        self._drafted = False

    def rest(self, *, forecasts: bool) -> int:
        """Return for how many rounds the drafter is to sleep, 0 if it may draft."""
        if forecasts or self.account.room >= self._loss_of(1):
            return self.account.rest()
        return self.account.tokens_until(self._loss_of(2))

    def _loss_of(self, nodes: int) -> float:
        """Return the loss of a draft of so many nodes if all are rejected; 0 before it is known."""
        if not self._costs.widest:
            return 0.0
        # No more than may be lost at first: a steep curve must not let it sleep for ever.
        return max(0.0, min(self._costs.seconds(1 + nodes) / self._costs.seconds(1) - 1.0, START))

    def affordable(self, wanted: int, *, trusted: bool = False) -> int:
        """Return how many nodes, of so many, may all be rejected."""
        costs = self._costs
        widest = costs.widest
        if not costs.spread:
            if not widest:
                return 0  # the first rounds are plain: all others are compared with them
            # A curve that was not measured may be far off: drafts widen step by step.
            known = widest - 1
            wanted = min(wanted, max(_FIRST, _GROWTH * known) if trusted else max(1, 2 * known))
        room = self.account.room + TRUST * trusted
        limit = (1.0 + room) * costs.seconds(1)
        if costs.seconds(1 + wanted) <= limit:
            return wanted
        return next((n for n in range(wanted, 0, -1) if costs.seconds(1 + n) <= limit), 0)

    def tokens_for(self, nodes: int) -> int:
        """Return after how many tokens without a draft so many nodes may be drafted on trust."""
        loss = self._costs.seconds(1 + nodes) / self._costs.seconds(1) - 1.0
        return self.account.tokens_until(min(loss - TRUST, START))

    def book(self, width: int, new: int, evaluated: float, own: float = 0.0) -> bool:
        """Count a round of `new` tokens, of which the drafter itself took `own` plain rounds.

        Return whether it was compared with plain decoding.

        So it is if it drafted, or follows one that did: its shape is another one again, for which a
        graph is built anew.
        """
        costs = self._costs
        follows, self._drafted = self._drafted, width > 1
        self.account.allow(new)
        if width == 1 and not follows:
            self.account.lose(own)
            return False
        # Pauses of the machine are no loss of the drafter's, as far as they can be recognised.
        plain = costs.seconds(1)
        self.account.lose(min(evaluated, STALL * costs.seconds(width)) / plain - new + own)
        return True


class TimedDrafter(Drafter):
    """Reports each round's time after the draft to `costs`, and drafts as its pace allows.

    A drafter that finds the text is not called at all while it sleeps: a note that it sleeps costs
    too much if a token takes little. All others observe these rounds, for they need the
    target's states. `share` is how much of a plain round's time one takes now that is evaluated
    with other conversations.
    """

    def __init__(
        self,
        inner: Drafter,
        costs: LiveCurve,
        clock: Callable[[], float],
        pace: Pace = "timed",
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.name, self.inner, self.pace = inner.name, inner, pace
        self.max_leaves, self.max_nodes = inner.max_leaves, inner.max_nodes
        self.max_filled = inner.max_filled
        self.n_params, self.depth_params = inner.n_params, inner.depth_params
        self.needs_hidden_states = inner.needs_hidden_states
        self.remark = inner.remark
        self.layer_inputs = inner.layer_inputs
        self.needs_nextn_states = inner.needs_nextn_states
        self.reads_logits = inner.reads_logits
        self.keeps_rows, self.finds_text = inner.keeps_rows, inner.finds_text
        self.forecasts = inner.forecasts
        self.embedding_inputs, self.waits = inner.embedding_inputs, inner.waits
        self._costs, self._clock, self._share = costs, clock, share
        self._break_even = BreakEven(costs)
        # A drafter with a plan, or one that is not to be stopped, chooses its length itself.
        self._is_bounded = pace == "paying"
        self.pause = Pause() if self._is_bounded else inner.pause
        self._request: DraftRequest | None = None  # of the round under way
        self._stops = False  # whether this round may be stopped
        self._asked: float | None = None  # when, by the clock; None while it sleeps
        self._proposed: float | None = None
        self._rest = 0  # rounds that it sleeps on
        self._stopped = 0
        self._is_first = True  # the first draft of an answer also takes the time of the prompt

    def take_target(self, target: TargetModel) -> None:
        """Pass on."""
        self.inner.take_target(target)

    def begin(self, tokens: Sequence[int]) -> None:
        """Pass on; the loss stays, and it sleeps on."""
        self._end_pause()
        self._request, self._proposed, self._stopped, self._is_first = None, None, 0, True
        self.inner.begin(tokens)
        if self._is_bounded:
            self.pause.begin(self._rest)

    def take_over(self, other: Drafter, length: int) -> int:
        """Pass on."""
        return self.inner.take_over(other.inner, length) if isinstance(other, TimedDrafter) else 0

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on."""
        self.inner.learn_prompt(start, rows, count)

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Pass on."""
        self.inner.read_along(tokens, end)

    def prepare(self, request: DraftRequest) -> bool:
        """Pass on, unless it sleeps: then there is nothing to wait for."""
        self._start(request)
        return self._asked is None or self.inner.prepare(request)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the drafter's proposal within the limits of its pace."""
        self._start(request)
        if self._asked is None:
            self._proposed = self._clock()
            return NOTHING
        wanted = most = min(request.max_nodes, self.max_nodes)
        whole = request
        if self._is_bounded:
            most = self._affordable(request, wanted)
            self._stopped += not most and wanted > 0 and self._costs.widest > 0
            if most < wanted:
                request = request.within(most, most)
        tree = self.inner.propose(request)
        if not tree.tokens and most < wanted and self.inner.forecast(whole) > 1.0:
            self._rest = self._break_even.tokens_for(min(wanted, 2 * most + 1))
        self._proposed = self._clock()
        return tree

    def _start(self, request: DraftRequest) -> None:
        """Begin a round, unless it has begun: decide whether the drafter sleeps."""
        if self._request is request:
            return
        self._request, self._asked, self._proposed = request, self._clock(), None
        self._end_pause()
        greedy = self.pace == "greedy" and request.params.is_greedy
        self._stops = self._is_bounded or self.pace == "compared" or greedy
        if not self._stops:
            return
        if not self._is_bounded and not self._costs.is_told:
            self._asked = None  # before plain rounds are known nothing may be drafted
            return
        forecasts = self.inner.forecasts or not self._is_bounded
        self._rest = self._rest or self._break_even.rest(forecasts=forecasts)
        if self._rest:
            self._rest -= 1
            self._stopped += 1
            self._asked = None

    def _affordable(self, request: DraftRequest, wanted: int) -> int:
        """Return how many nodes it may draft, of so many."""
        most = self._break_even.affordable(wanted)
        trusted = self._break_even.affordable(wanted, trusted=True)
        # Its forecast is only computed if that decides.
        if trusted > most and self.inner.forecasts and self.inner.forecast(request) > 1.0:
            return trusted
        return most

    def _end_pause(self) -> None:
        """Count the rounds in which it was not called."""
        if not self._is_bounded:
            return
        lasted = self.pause.end()
        if lasted:
            self._rest -= lasted
            self._stopped += lasted
            self._break_even.account.allow(lasted)
            self._costs.pass_over(lasted)

    def forecast(self, request: DraftRequest) -> float:
        """Pass on."""
        return self.inner.forecast(request)

    def observe(self, outcome: RoundOutcome) -> None:
        """Report the round's time to the curve, and pass on unless it sleeps; book its loss."""
        now, width, share = self._clock(), 1 + len(outcome.tree), self._share()
        spent = 0.0 if self._proposed is None else now - self._proposed
        evaluated = spent / share
        if self._proposed is not None:
            self._costs.learn(width, evaluated)
        self._proposed = self._request = None
        if not self._stops:
            self.inner.observe(outcome)
            return
        if self._asked is not None:
            self.inner.observe(outcome)
            own = self._own_rounds(max(0.0, self._clock() - self._asked - spent) / share)
            self._break_even.book(width, outcome.n_new, evaluated, own)
            return
        compared = self._break_even.book(width, outcome.n_new, evaluated)
        if not self._is_bounded:
            self.inner.observe(outcome)
        elif not compared:  # one more is timed otherwise: that one was no plain round
            self.pause.begin(self._rest)

    def _own_rounds(self, seconds: float) -> float:
        """Return the plain rounds that the drafter itself took, as they are booked."""
        account, plain = self._break_even.account, self._costs.seconds(1)
        first, self._is_first = self._is_first, False
        if self._is_bounded:
            return account.asking(seconds, plain)
        return 0.0 if first else account.drafting(seconds, plain)

    def rewind(self, length: int) -> None:
        """Pass on."""
        self.inner.rewind(length)

    def report(self) -> dict[str, Any]:
        """Return the drafter's report, and in how many rounds it was stopped."""
        self._end_pause()
        stopped = {"stopped": self._stopped} if self._stopped else {}
        return {**self.inner.report(), **stopped}

    @property
    def native_seconds(self) -> float:
        """Pass on."""
        return self.inner.native_seconds

    def close(self) -> None:
        """Pass on."""
        self.inner.close()
