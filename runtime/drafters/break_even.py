"""Drafting that pays: a drafter without a model is stopped while it loses time.

What it proposes is chosen by estimates, of acceptance and of costs, which a text and a machine may
belie. So its rounds are timed: they teach the curve that it plans with (`LiveCurve`), and what they
lose against plain decoding, its own Python included, is booked (`Account`). It may draft as many
nodes as fit the account if all of them are rejected. Where not one fits, it sleeps until a short
draft does: to be asked in vain takes the time that is being saved up, and may be all that a token
allows (a small model, a fast machine). To be told that it sleeps costs too much there as well: it
is not called at all until it wakes.

Its drafts are point masses, so the text is plain decoding's own whenever it is stopped. Nothing of
this is for drafters that draw: what they draft is part of which text comes of a seed.
"""

from __future__ import annotations

import math
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


class TimedDrafter(Drafter):
    """Passes everything on, and tells `costs` what each round took after its draft was made."""

    def __init__(self, inner: Drafter, costs: LiveCurve, clock: Callable[[], float]) -> None:
        self.name, self.inner = inner.name, inner
        self.max_leaves, self.max_nodes = inner.max_leaves, inner.max_nodes
        self.needs_hidden_states = inner.needs_hidden_states
        self.remark = inner.remark
        self.layer_inputs = inner.layer_inputs
        self.needs_nextn_states = inner.needs_nextn_states
        self.reads_logits = inner.reads_logits
        self.keeps_rows, self.finds_text = inner.keeps_rows, inner.finds_text
        self.embedding_inputs, self.pause = inner.embedding_inputs, inner.pause
        self.waits = inner.waits
        self._costs, self._clock = costs, clock
        self._proposed: float | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Pass on."""
        self._proposed = None
        self.inner.begin(tokens)

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
        """Pass on, and look at the clock."""
        tree = self.inner.propose(request)
        self._proposed = self._clock()
        return tree

    def forecast(self, request: DraftRequest) -> float:
        """Pass on."""
        return self.inner.forecast(request)

    def observe(self, outcome: RoundOutcome) -> None:
        """Pass on, and tell the curve."""
        self._time(outcome)
        self.inner.observe(outcome)

    def _time(self, outcome: RoundOutcome) -> float:
        """Tell the curve, and return the seconds since the draft was made."""
        now = self._clock()
        seconds = 0.0 if self._proposed is None else now - self._proposed
        if self._proposed is not None:
            self._costs.learn(1 + len(outcome.tree), seconds)
        self._proposed = None
        return seconds

    def rewind(self, length: int) -> None:
        """Pass on."""
        self.inner.rewind(length)

    def report(self) -> dict[str, Any]:
        """Pass on."""
        return self.inner.report()

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


class ComparedDrafter(TimedDrafter):
    """Lets the first rounds be plain: what all others take is compared with them.

    Of a drafter that `draws` only those at temperature 0: elsewhere its drafts are part of which
    text comes of a seed, and must not hang on what was timed before.
    """

    def __init__(
        self, inner: Drafter, costs: LiveCurve, clock: Callable[[], float], *, draws: bool
    ) -> None:
        super().__init__(inner, costs, clock)
        self._draws = draws

    def propose(self, request: DraftRequest) -> DraftTree:
        """Pass on; before two plain rounds were timed nothing may be drafted."""
        waits = not self._costs.widest and not (self._draws and not request.params.is_greedy)
        return super().propose(request.within(0, 0) if waits else request)


class PayingDrafter(TimedDrafter):
    """Lets a drafter without a model draft what it may lose, and sleep while it may lose nothing.

    A drafter that slept was told nothing of the tokens that came meanwhile: it finds them in the
    next request.
    """

    def __init__(self, inner: Drafter, costs: LiveCurve, clock: Callable[[], float]) -> None:
        super().__init__(inner, costs, clock)
        self.pause = Pause()
        self._account = Account(_SHARE, _MOST)
        self._asked = 0.0
        self._asks = self._drafted = False
        self._rest = 0  # rounds that it sleeps on
        self._stopped = 0
        self._own: deque[float] = deque(maxlen=_OWN)  # seconds of its own, lately

    def begin(self, tokens: Sequence[int]) -> None:
        """Pass on; the account goes on, for what was lost is lost."""
        self._end_pause()
        super().begin(tokens)
        self._stopped = 0
        self.pause.begin(self._rest)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return what the drafter proposes within what it may lose."""
        self._asked = self._clock()
        self._end_pause()
        if not self._rest and (room := self._account.room) < self._loss_of(1):
            self._rest = math.ceil((self._loss_of(_WAKES) - room) / _SHARE)
        self._asks = not self._rest
        if not self._asks:
            self._rest -= 1
            self._stopped += 1
            self._proposed = self._asked
            return NOTHING
        wanted = min(request.max_nodes, self.max_nodes)
        most = self._affordable(wanted)
        self._stopped += not most and wanted > 0 and self._costs.widest > 0
        if most < wanted:
            request = request.within(most, most)
        return super().propose(request)

    def _end_pause(self) -> None:
        """Count the rounds in which it was not called."""
        lasted = self.pause.end()
        if lasted:
            self._rest -= lasted
            self._stopped += lasted
            self._account.allow(lasted)
            self._costs.pass_over(lasted)

    def _loss_of(self, nodes: int) -> float:
        """Return what a draft of so many nodes loses if all are rejected; 0 before it is known."""
        if not self._costs.widest:
            return 0.0
        # No more than can be saved up: a steep curve must not let it sleep for ever.
        return max(0.0, min(self._costs.seconds(1 + nodes) / self._costs.seconds(1) - 1.0, _MOST))

    def _affordable(self, wanted: int) -> int:
        """Return how many nodes, of so many, may all be rejected."""
        costs = self._costs
        widest = costs.widest
        if not widest:
            return 0  # the first rounds are plain: all others are compared with them
        if not costs.spread:
            # A curve that nobody measured may be far off: drafts are at most twice as long as any.
            wanted = min(wanted, max(1, 2 * (widest - 1)))
        limit = (1.0 + self._account.room) * costs.seconds(1)
        if costs.seconds(1 + wanted) <= limit:
            return wanted
        return next((n for n in range(wanted, 0, -1) if costs.seconds(1 + n) <= limit), 0)

    def observe(self, outcome: RoundOutcome) -> None:
        """Book what the round lost or won; the drafter hears of it unless it sleeps."""
        costs, width, lost = self._costs, 1 + len(outcome.tree), 0.0
        # The round after a draft has another shape again: its graph is built anew.
        follows, self._drafted = self._drafted, width > 1
        evaluated = self._time(outcome)
        self._account.allow(outcome.n_new)
        if width > 1 or follows:
            # Pauses of the machine are no loss of the drafter's, as far as they can be told.
            lost = min(evaluated, STALL * costs.seconds(width)) - outcome.n_new * costs.seconds(1)
        if self._asks:
            self.inner.observe(outcome)
            lost += ASKING * self._usual_own(max(0.0, self._clock() - self._asked - evaluated))
        elif not follows:  # one more is timed otherwise: that one was not what plain rounds take
            self.pause.begin(self._rest)
        if lost:
            self._account.lose(lost / costs.seconds(1))

    def _usual_own(self, seconds: float) -> float:
        """Return the seconds that the drafter took itself, cut to what is usual."""
        # The very first time everything is cold, which does not come again.
        usual = STALL * lower_median(self._own) if self._own else 0.0
        self._own.append(seconds)
        return min(seconds, usual)

    def report(self) -> dict[str, Any]:
        """Return what the drafter says, and in how many rounds it was stopped."""
        self._end_pause()
        stopped = {"stopped": self._stopped} if self._stopped else {}
        return {**self.inner.report(), **stopped}
