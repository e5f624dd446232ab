"""Drafters whose rounds are timed, and stopped while they do not break even.

A drafter plans with a cost curve (`LiveCurve`), which its rounds correct. What measured time may
decide is its `Pace`:

- timed: what evaluations are believed to cost;
- compared: the same. If costs were not measured, its first rounds are plain: all others are
  compared with them;
- greedy: of a drafter that draws, as compared at temperature 0. Elsewhere its drafts are part of
  which text comes of a seed, and must not depend on what was timed before;
- paying: also when to stop. A drafter without a model proposes by estimates of acceptance and costs
  that a text and a machine may belie (`BreakEven`). Its drafts are point masses, so the text is
  plain decoding's own whenever it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specrun.runtime.language import ExpressionOptions
from specrun.runtime.planning import STALL, START, TRUST, Account, LiveCurve
from specrun.runtime.round.drafter import NOTHING, Drafter, DraftRequest, Pace, Pause, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows, TargetModel
from specrun.runtime.trees.tree import DraftTree

_YES_NO = ["yes", "no"]
_FIRST, _GROWTH = 3, 4  # nodes of a first draft, and how much wider the next may be


def pace_of(options: ExpressionOptions) -> Pace:
    """Return whether a drafter without a model is to be stopped: its option `always`."""
    return "counted" if options.choice("always", _YES_NO, "no") == "yes" else "paying"


class BreakEven:
    """What a drafter without a model may draft, by what its rounds lost against plain decoding.

    Their loss is booked (`Account`), the drafter's own Python included. A draft that is expected to
    gain (`Drafter.forecast`) is made while anything may be lost, others as far as all of their
    nodes may be rejected. If not even one fits, the drafter sleeps: to ask it in vain takes the
    time that is being saved up, and may be all that a token allows (a small model, a fast machine).
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
        """Return what a draft of so many nodes loses if all are rejected; 0 before it is known."""
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

    def book(self, width: int, new: int, evaluated: float) -> bool:
        """Count a round of `new` tokens; return whether it was compared with plain decoding.

        So it is if it drafted, or follows one that did: its shape is another one again, for which a
        graph is built anew.
        """
        costs = self._costs
        follows, self._drafted = self._drafted, width > 1
        self.account.allow(new)
        if width == 1 and not follows:
            return False
        # Pauses of the machine are no loss of the drafter's, as far as they can be told.
        plain = costs.seconds(1)
        self.account.lose(min(evaluated, STALL * costs.seconds(width)) / plain - new)
        return True


class TimedDrafter(Drafter):
    """Tells `costs` what each round took after its draft was made, and drafts what its pace allows.

    A paying drafter that sleeps is not called at all: to be told that it sleeps costs too much
    where a token takes little. It is told nothing of the tokens that come meanwhile, and finds them
    in the next request.
    """

    def __init__(
        self, inner: Drafter, costs: LiveCurve, clock: Callable[[], float], pace: Pace = "timed"
    ) -> None:
        self.name, self.inner, self.pace = inner.name, inner, pace
        self.max_leaves, self.max_nodes = inner.max_leaves, inner.max_nodes
        self.max_filled = inner.max_filled
        self.needs_hidden_states = inner.needs_hidden_states
        self.remark = inner.remark
        self.layer_inputs = inner.layer_inputs
        self.needs_nextn_states = inner.needs_nextn_states
        self.reads_logits = inner.reads_logits
        self.keeps_rows, self.finds_text = inner.keeps_rows, inner.finds_text
        self.forecasts = inner.forecasts
        self.embedding_inputs, self.waits = inner.embedding_inputs, inner.waits
        self._costs, self._clock = costs, clock
        self._break_even = BreakEven(costs) if pace == "paying" else None
        self.pause = inner.pause if self._break_even is None else Pause()
        self._asked: float | None = None  # when, by the clock; None while it sleeps
        self._proposed: float | None = None
        self._rest = 0  # rounds that it sleeps on
        self._stopped = 0

    def take_target(self, target: TargetModel) -> None:
        """Pass on."""
        self.inner.take_target(target)

    def begin(self, tokens: Sequence[int]) -> None:
        """Pass on; what was lost is lost, and it sleeps on."""
        self._end_pause()
        self._proposed, self._stopped = None, 0
        self.inner.begin(tokens)
        if self._break_even is not None:
            self.pause.begin(self._rest)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on."""
        self.inner.learn_prompt(start, rows, count)

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Pass on."""
        self.inner.read_along(tokens, end)

    def prepare(self, request: DraftRequest) -> bool:
        """Pass on."""
        return self.inner.prepare(request)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return what the drafter proposes within what its pace allows."""
        self._asked = now = self._clock()
        if self._break_even is not None:
            self._end_pause()
            self._rest = self._rest or self._break_even.rest(forecasts=self.inner.forecasts)
            if self._rest:
                self._rest -= 1
                self._stopped += 1
                self._asked, self._proposed = None, now
                return NOTHING
            wanted = min(request.max_nodes, self.max_nodes)
            most = self._affordable(request, wanted)
            self._stopped += not most and wanted > 0 and self._costs.widest > 0
            if most < wanted:
                request = request.within(most, most)
        elif self._compares(request) and not self._costs.is_told:
            # Before plain rounds are known nothing may be drafted.
            request = request.within(0, 0)
        tree = self.inner.propose(request)
        self._proposed = self._clock()
        return tree

    def _affordable(self, request: DraftRequest, wanted: int) -> int:
        """Return how many nodes it may draft, of so many."""
        assert self._break_even is not None
        most = self._break_even.affordable(wanted)
        trusted = self._break_even.affordable(wanted, trusted=True)
        # It is only asked what it expects if that decides.
        if trusted > most and self.inner.forecasts and self.inner.forecast(request) > 1.0:
            return trusted
        return most

    def _compares(self, request: DraftRequest) -> bool:
        return self.pace == "compared" or (self.pace == "greedy" and request.params.is_greedy)

    def _end_pause(self) -> None:
        """Count the rounds in which it was not called."""
        if self._break_even is None:
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
        """Tell the curve what the round took, and pass on unless it sleeps; book what it lost."""
        now, width = self._clock(), 1 + len(outcome.tree)
        evaluated = 0.0 if self._proposed is None else now - self._proposed
        if self._proposed is not None:
            self._costs.learn(width, evaluated)
        self._proposed = None
        if self._break_even is None:
            self.inner.observe(outcome)
            return
        compared = self._break_even.book(width, outcome.n_new, evaluated)
        if self._asked is not None:
            self.inner.observe(outcome)
            own = max(0.0, self._clock() - self._asked - evaluated)
            self._break_even.account.lose_to_asking(own, self._costs.seconds(1))
        elif not compared:  # one more is timed otherwise: that one was not what plain rounds take
            self.pause.begin(self._rest)

    def rewind(self, length: int) -> None:
        """Pass on."""
        self.inner.rewind(length)

    def report(self) -> dict[str, Any]:
        """Return what the drafter reports, and in how many rounds it was stopped."""
        self._end_pause()
        stopped = {"stopped": self._stopped} if self._stopped else {}
        return {**self.inner.report(), **stopped}

    @property
    def native_seconds(self) -> float:
        """Pass on."""
        return self.inner.native_seconds

    @property
    def n_params(self) -> int:
        """Pass on."""
        return self.inner.n_params

    @property
    def depth_params(self) -> float:
        """Pass on."""
        return self.inner.depth_params

    def close(self) -> None:
        """Pass on."""
        self.inner.close()
