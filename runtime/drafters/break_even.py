"""Drafters whose rounds are timed, and stopped while they do not break even.

A drafter plans with a cost curve (`LiveCurve`), which its rounds correct. What measured time may
decide is its `Pace`:

- timed: what evaluations are believed to cost;
- compared: the same. Its first rounds are plain, for all others are compared with them;
- greedy: of a drafter that draws, as compared at temperature 0. Elsewhere its drafts are part of
  which text comes of a seed, and must not depend on what was timed before;
- paying: also when to stop. A drafter without a model proposes by estimates of acceptance and costs
  that a text and a machine may belie (`BreakEven`). Its drafts are point masses, so the text is
  plain decoding's own whenever it is stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from specrun.runtime.language import ExpressionOptions
from specrun.runtime.planning import ASKING, STALL, Account, LiveCurve, lower_median
from specrun.runtime.round.drafter import NOTHING, Drafter, DraftRequest, Pace, Pause, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees.tree import DraftTree

_YES_NO = ["yes", "no"]
# Of each token, and at a time, in plain rounds, what may be lost: 1.9 % of any 200 tokens.
# The rest of 3 % is what a context for trees costs over one for single tokens.
_SHARE, _MOST = 0.0125, 1.25
_OWN = 9  # rounds that tell what the drafter's own Python usually takes
_WAKES = 2  # nodes of the draft that must fit the account before a drafter is asked again


def pace_of(options: ExpressionOptions) -> Pace:
    """Return whether a drafter without a model is to be stopped: its option `always`."""
    return "counted" if options.choice("always", _YES_NO, "no") == "yes" else "paying"


class BreakEven:
    """What a drafter without a model may draft, by what its rounds lost against plain decoding.

    Their loss is booked (`Account`), the drafter's own Python included. It may draft as many nodes
    as fit the account if all of them are rejected. If not one fits, it sleeps until a short draft
    does. To ask it in vain takes the time that is being saved up, and may be all that a token
    allows (a small model, a fast machine).
    """

    def __init__(self, costs: LiveCurve) -> None:
        self._costs, self._account = costs, Account(_SHARE, _MOST)
        self._drafted = False
        self._own: deque[float] = deque(maxlen=_OWN)  # seconds of the drafter's own, lately

    def rest(self) -> int:
        """Return for how many rounds the drafter is to sleep, 0 if it may draft."""
        if self._account.room >= self._loss_of(1):
            return 0
        return self._account.tokens_until(self._loss_of(_WAKES))

    def _loss_of(self, nodes: int) -> float:
        """Return what a draft of so many nodes loses if all are rejected; 0 before it is known."""
        if not self._costs.widest:
            return 0.0
        # No more than can be saved up: a steep curve must not let it sleep for ever.
        return max(0.0, min(self._costs.seconds(1 + nodes) / self._costs.seconds(1) - 1.0, _MOST))

    def affordable(self, wanted: int) -> int:
        """Return how many nodes, of so many, may all be rejected."""
        costs = self._costs
        widest = costs.widest
        if not widest:
            return 0  # the first rounds are plain: all others are compared with them
        if not costs.spread:
            # A curve that was not measured may be far off: drafts are at most twice as long as any.
            wanted = min(wanted, max(1, 2 * (widest - 1)))
        limit = (1.0 + self._account.room) * costs.seconds(1)
        if costs.seconds(1 + wanted) <= limit:
            return wanted
        return next((n for n in range(wanted, 0, -1) if costs.seconds(1 + n) <= limit), 0)

    def allow(self, tokens: int) -> None:
        """Count tokens that were decoded without it."""
        self._account.allow(tokens)

    def book(self, width: int, new: int, evaluated: float) -> tuple[float, bool]:
        """Count a round of `new` tokens; return the seconds it lost, and whether it was compared.

        So it is if it drafted, or follows one that did: its shape is another one again, for which a
        graph is built anew.
        """
        costs = self._costs
        follows, self._drafted = self._drafted, width > 1
        self._account.allow(new)
        if width == 1 and not follows:
            return 0.0, False
        # Pauses of the machine are no loss of the drafter's, as far as they can be told.
        return min(evaluated, STALL * costs.seconds(width)) - new * costs.seconds(1), True

    def lose(self, seconds: float) -> None:
        """Count seconds that were lost or, below 0, saved."""
        if seconds:
            self._account.lose(seconds / self._costs.seconds(1))

    def asking(self, seconds: float) -> float:
        """Return what it costs to ask a drafter that took so many seconds itself."""
        # The very first time everything is cold, which does not come again.
        usual = STALL * lower_median(self._own) if self._own else 0.0
        self._own.append(seconds)
        return ASKING * min(seconds, usual)


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
        self.needs_hidden_states = inner.needs_hidden_states
        self.remark = inner.remark
        self.layer_inputs = inner.layer_inputs
        self.needs_nextn_states = inner.needs_nextn_states
        self.reads_logits = inner.reads_logits
        self.keeps_rows, self.finds_text = inner.keeps_rows, inner.finds_text
        self.embedding_inputs, self.waits = inner.embedding_inputs, inner.waits
        self._costs, self._clock = costs, clock
        self._break_even = BreakEven(costs) if pace == "paying" else None
        self.pause = inner.pause if self._break_even is None else Pause()
        self._asked: float | None = None  # when, by the clock; None while it sleeps
        self._proposed: float | None = None
        self._rest = 0  # rounds that it sleeps on
        self._stopped = 0

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
            self._rest = self._rest or self._break_even.rest()
            if self._rest:
                self._rest -= 1
                self._stopped += 1
                self._asked, self._proposed = None, now
                return NOTHING
            wanted = min(request.max_nodes, self.max_nodes)
            most = self._break_even.affordable(wanted)
            self._stopped += not most and wanted > 0 and self._costs.widest > 0
            if most < wanted:
                request = request.within(most, most)
        elif self._compares(request) and not self._costs.widest:
            # Before two plain rounds were timed nothing may be drafted.
            request = request.within(0, 0)
        tree = self.inner.propose(request)
        self._proposed = self._clock()
        return tree

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
            self._break_even.allow(lasted)
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
        lost, compared = self._break_even.book(width, outcome.n_new, evaluated)
        if self._asked is not None:
            self.inner.observe(outcome)
            own = max(0.0, self._clock() - self._asked - evaluated)
            lost += self._break_even.asking(own)
        elif not compared:  # one more is timed otherwise: that one was not what plain rounds take
            self.pause.begin(self._rest)
        self._break_even.lose(lost)

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
