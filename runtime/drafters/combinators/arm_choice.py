"""A multi-armed bandit over rounds: the fastest way to decode, and what may be lost to find it.

An arm is a drafter, its reward tokens per second. The arm of the best measured rate is used. Others
are probed while they may be better: their rate plus its uncertainty exceeds the best rate (optimism
in the face of uncertainty: UCB, Auer et al. 2002), or `_SPACING` tokens have passed without them,
so that a drafter that becomes good is noticed.

**What is guaranteed.** Time is counted in rounds of plain decoding, which are what is measured
first. An account holds what all drafting rounds took beyond plain rounds for the same tokens. A
round drafts only if the worst that it may cost (its draft, and the wider evaluation of which
nothing is accepted) fits what is left of `START` + `SHARE` a token (`costs.account`), or if the
arm's own rounds were faster than plain ones; then it can lose again what it had gained. So n tokens
take at most

    n (1 + SHARE) + START  rounds of plain decoding

whatever is accepted, if rounds cost what they are expected to: what drafts of that length were
measured to cost, and before that what the sizes of the models and the target's cost curve say. A
probe that costs more, because they are wrong, is lost once and stands in the account. Two
things are outside of it. To read a prompt that only the target has read yet, drafters may take
`_READING` of the time that it took the target, and an arm that was measured faster what it wins
back within `_PAYBACK` tokens. And rounds that take several times as long as usual were disturbed
by something else.

An arm that is new, or was found slower than plain decoding, drafts few tokens at first, as many as
stake `_STAKE` of a plain round (or one), and twice as many each time half of a draft is accepted.
Its reading of the text is part of a probe: one that reads slower than `SHARE` allows, about a
seventh of the target's size on a CPU, cannot come back into a long text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrun.runtime.costs import STALL, START, Account
from specrun.runtime.drafters.combinators.arms import Arm, ArmForecast

SHARE = 0.025
"""Of each token's plain round, what may be lost: with `START` it is 3 % of 512 tokens."""

_READING, _PAYBACK = 0.15, 64  # of the target's time; tokens
_PROBING = 0.025  # of the time so far, which probes may lose against the best arm, beside START
_STAKE = 0.5  # rounds of plain decoding that the first draft of an arm may lose
# Tokens after which an arm is tried again whatever was found, and half of that is forgotten.
_SPACING = 128
# An arm that could not be the best even if all of its drafts were accepted waits for so many.
_LATER = 512
_OPTIMISM = 1.5  # standard errors in an arm's favour
_CAUTION = 0.5  # standard errors that a probed arm has to be better by to take the best one's place
# The relative standard deviation of a rate's change after so many rounds unseen.
_DRIFT, _DRIFT_ROUNDS = 0.1, 32
# Rounds after which an arm that is alike but more complicated is known, and left alone for.
_WELL_KNOWN, _TIED_ROUNDS = 16.0, 256
_MAX_PATIENCE, _WAIT = 8, 16  # after 1, 2, 3 vain probes an arm waits for 16, 48, 112 tokens
_FIRST_ROUNDS = 2  # of plain decoding, before others are looked at
_SEGMENT = 6  # rounds between decisions while the best arm is used
_PROBE_ROUNDS, _SHORT_PROBE = 4, 2  # short: of an arm whose drafts are limited
_TIE = 0.03  # rates that differ by less than this share are alike: the simpler arm is taken
_MEASURABLE = 64  # tokens behind from which an arm's first round tells what catching up costs
_TICK = 1e-9  # the shortest round: clocks may stand still
_SAVING = 512  # tokens in which what a probe may lose is saved up, if it can be at all
_SPARE = 0.1  # of all that may be lost: what a probe may take while others are being saved for


class ArmChooser:
    """Chooses an arm and the length of its draft for each round; learns from tokens and seconds.

    `plain` is the arm that is plain decoding; it is the first to be used. `known` are the arms of
    an earlier text, whose rates are believed to be as they were.
    """

    def __init__(
        self, forecasts: Sequence[ArmForecast], plain: int, *, known: Sequence[Arm] = ()
    ) -> None:
        self._forecasts, self._plain = tuple(forecasts), plain
        self._first_depths = [forecast.deepest(_STAKE) for forecast in forecasts]
        self._margins = [forecast.margin for forecast in forecasts]
        # Of each arm, its scale and the `ceiling` at it: a curve that is learnt moves little.
        self._ceilings: dict[int, tuple[float, float]] = {}
        self._target_reading = forecasts[plain].target_reading
        self._arms = [arm.for_another_text() for arm in known] or [
            Arm(depth=depth) for depth in self._first_depths
        ]
        self._arms[plain].depth = 0
        self._now = 0
        self._account = Account(SHARE)
        self._lost = self._elapsed = self._credit = 0.0  # in plain rounds
        self._best = self._current = plain
        self._left = 0
        self._probing = False
        # Tokens, seconds and nodes drafted, of the rounds since the arm changed.
        self._run: list[tuple[int, float, int]] = []
        self._behind = 0  # how far the arm was behind when that run began
        # Rounds of plain decoding in a row, tokens and seconds, that are not counted yet: several
        # at once cost little more than one, whose code an evaluation drove out of the caches.
        self._waiting: list[tuple[int, float]] = []

    def begin(self, n_new: int) -> None:
        """Start another text, `n_new` tokens of which are new to all arms."""
        self._count_waiting()
        self._finish_run()
        self._ceilings.clear()
        self._left = 0
        self._credit = _READING * n_new * self._target_reading
        for arm in self._arms:
            arm.behind += n_new
            arm.patience = 1.0

    @property
    def arms(self) -> list[Arm]:
        """What is known of each arm."""
        self._count_waiting()
        return self._arms

    @property
    def has_room(self) -> bool:
        """Whether anything may be lost to drafting now; after some rounds, only what is booked."""
        known = self._now < _FIRST_ROUNDS or self._plain_seconds > 0.0
        return known and self._account.room > 0.0

    def choose(self) -> tuple[int, int]:
        """Return the arm of the next round, and how much it may draft (0: all it likes)."""
        if self._left > 0 and self._current == self._plain:
            self._left -= 1  # nothing is drafted that might not fit any more
            return self._plain, 0
        if self._left <= 0:
            self._count_waiting()
        # All rounds of a probe fitted when it began: it goes on unless they took far more, for a
        # first round may only have been a cold start.
        over = self._account.room < -START
        depth = self._arms[self._current].depth
        if self._left <= 0 or (over if self._probing else self._fitting(self._current) != depth):
            self._decide()
        self._left -= 1
        return self._current, self._arms[self._current].depth

    def record(self, index: int, tokens: int, seconds: float, drafted: int) -> None:
        """Learn what a round of an arm that drafted so many nodes gave, chosen or replayed."""
        if index == self._plain == self._current and len(self._run) > 1 and not self._probing:
            self._waiting.append((tokens, seconds))
            if len(self._waiting) == _SEGMENT:
                self._count_waiting()
            return
        self._count_waiting()
        self._record(index, tokens, seconds, drafted)

    def _count_waiting(self) -> None:
        """Count the rounds of plain decoding that wait."""
        waiting, self._waiting = self._waiting, []
        for tokens, seconds in waiting:
            self._record(self._plain, tokens, seconds, 0)

    def _record(self, index: int, tokens: int, seconds: float, drafted: int) -> None:
        if index != self._current:
            self._finish_run()
            self._current, self._left, self._probing = index, 0, False
        arm = self._arms[index]
        seconds = max(seconds, _TICK)
        self._run.append((tokens, seconds, drafted))
        if len(self._run) == 1:
            self._behind = arm.behind
            arm.fade(0.5 ** ((self._now - arm.last_seen) / _SPACING))
        self._book(index, tokens, seconds)
        self._now += 1
        self._account.allow(tokens)
        # The first round includes catching up with the text; it
        # is counted when a second tells how much.
        if len(self._run) > 1:
            if len(self._run) == 2:
                self._count_first(index, seconds)
            self._count(index, tokens, seconds, drafted)
            # Not before the second is counted too, whose draft was as long as the first.
            self._lengthen(index, self._run[:2] if len(self._run) == 2 else self._run[-1:])
        arm.last_seen = self._now
        for other in self._arms:
            other.behind = 0 if other is arm else other.behind + tokens
        if self._probing and len(self._run) > 2 and self._possible_rate(arm) < self._best_rate:
            self._left = 0  # it is hopeless

    # -- learning ----------------------------------------------------------------------------------

    def _book(self, index: int, tokens: int, seconds: float) -> None:
        """Count what a round took beyond plain decoding, and a probe beyond the best arm."""
        plain = self._plain_seconds
        if not plain:
            return
        arm = self._arms[index]
        if len(self._run) == 1 and self._credit:
            usual = arm.usual(True) or plain * (1.0 + self._extra(index, arm.depth))
            free = min(self._credit * plain, max(0.0, seconds - usual))
            self._credit -= free / plain
            seconds -= free
        if (known := arm.usual(True)) is not None:
            # What disturbed a round from outside is not the arm's loss, as far as can be told.
            seconds = min(seconds, STALL * (known + self._reading(index) * plain))
        self._elapsed += seconds / plain
        if index != self._plain:
            self._account.lose(seconds / plain - tokens)
        if self._probing:
            self._lost = max(0.0, self._lost + (seconds - tokens / self._best_rate) / plain)

    def _count(self, index: int, tokens: int, seconds: float, drafted: int) -> None:
        """Take a round into the estimates of its arm."""
        arm, forecast = self._arms[index], self._forecasts[index]
        arm.add(tokens, seconds, drafted > 0)
        if index == self._plain:
            return
        plain = self._plain_seconds
        if plain and index == self._best and arm.notices_change(plain):
            self._left = 0
        if not drafted:
            return
        extra = forecast.extra(drafted)
        if plain and extra > 0.0:
            scale = max(0.0, seconds / plain - 1.0) / extra
            # The least that was ever measured: disturbances from outside only add.
            arm.scale = scale if arm.scale is None else min(arm.scale, scale)

    def _lengthen(self, index: int, rounds: Sequence[tuple[int, float, int]]) -> None:
        """Let an arm draft twice as much if one of its counted rounds went well."""
        arm, most = self._arms[index], self._forecasts[index].most
        halves = (2 * (n - 1) >= min(arm.depth, drafted) > 0 for n, _, drafted in rounds)
        if arm.depth and any(halves):
            arm.limit(2 * arm.depth if 2 * arm.depth < most else 0)
            if self._fitting(index) != arm.depth:
                self._left = 0  # what fitted when the probe began were shorter drafts

    def _count_first(self, index: int, usual: float) -> None:
        """Count the first round of a run, but not what of it was catching up."""
        arm = self._arms[index]
        tokens, seconds, drafted = self._run[0]
        usual = arm.usual(drafted > 0) or usual
        # Its very first round may have been a cold start, which would pass for slow reading.
        if self._behind >= _MEASURABLE and arm.rounds:
            excess = max(0.0, seconds - usual) / self._behind
            arm.catch_up = excess if arm.catch_up is None else min(arm.catch_up, excess)
        self._count(index, tokens, min(seconds, usual), drafted)

    def _finish_run(self) -> None:
        """Count a run that ended after its first round."""
        if len(self._run) == 1:
            self._count_first(self._current, self._run[0][1])
            self._lengthen(self._current, self._run)
        self._run.clear()

    # -- deciding ----------------------------------------------------------------------------------

    def _decide(self) -> None:
        if self._probing:
            self._judge_probe()
        if self._arms[self._plain].rounds:
            self._best = self._simplest_of_the_best()
            self._shorten_what_fails()
        probed = self._worth_probing()
        self._probing = probed is not None
        chosen = self._best if probed is None else probed
        depth = self._fitting(chosen, self._probe_rounds(chosen) if self._probing else 1)
        if depth is None:
            chosen, depth = self._plain, 0
        # Rounds of a run are alike: the first is counted by what the second takes.
        if chosen != self._current or depth != self._arms[chosen].depth:
            self._finish_run()
            self._current = chosen
        self._arms[chosen].limit(depth)
        self._left = _SEGMENT
        if self._probing:
            self._left = self._probe_rounds(chosen)
        elif not self._arms[self._plain].rounds:
            self._left = _FIRST_ROUNDS

    def _shorten_what_fails(self) -> None:
        """Let arms that are slower than plain decoding begin again with short drafts."""
        for arm, depth in zip(self._arms, self._first_depths, strict=True):
            if self._is_slow(arm):
                arm.limit(depth)

    def _simplest_of_the_best(self) -> int:
        """Return the arm of the best shown rate, or a simpler one that is as good as that."""
        arms = range(len(self._arms))
        best = max(arms, key=self._shown_rate)
        enough = (1.0 - _TIE) * self._arms[best].rate
        seen = [index for index in arms if self._arms[index].rounds or index == best]
        alike = [index for index in seen if index == best or self._arms[index].rate >= enough]

        def order(index: int) -> tuple[int, bool, float, int]:
            parts, rate = self._forecasts[index].parts, self._arms[index].rate
            return parts, index != best, -rate, index

        return min(alike, key=order)

    def _judge_probe(self) -> None:
        arm = self._arms[self._current]
        better = arm.rate > self._best_rate
        arm.patience = 1.0 if better else min(_MAX_PATIENCE, 2.0 * arm.patience)

    def _shown(self, index: int, caution: float) -> float:
        """Return the rate that an arm was shown to have, so many standard errors below the mean."""
        arm = self._arms[index]
        return arm.rate - caution * arm.error if arm.rounds else 0.0

    def _shown_rate(self, index: int) -> float:
        """Return the rate that an arm is ranked by; the best need not show anything more."""
        return self._shown(index, 0.0 if index == self._best else _CAUTION)

    def _is_slow(self, arm: Arm) -> bool:
        """Return whether an arm was shown to be slower than plain decoding."""
        rate = self._arms[self._plain].rate
        return arm.rounds > 0.0 and arm.rate + _CAUTION * arm.error < rate

    def _possible_rate(self, arm: Arm) -> float:
        """Return the rate that an arm may have, for all that is known."""
        if not arm.rounds:
            return math.inf
        unseen = (self._now - arm.last_seen) / (_DRIFT_ROUNDS * arm.patience)
        # A rate left unseen is taken to wander: the variance of a random walk grows with its steps.
        drift = _DRIFT * self._best_rate * math.sqrt(unseen)
        return arm.rate + _OPTIMISM * math.hypot(arm.error, drift)

    def _hope(self, index: int) -> float:
        """Return the rate that an arm may have; a more complicated one must be better by a tie."""
        arm, best = self._arms[index], self._arms[self._best]
        if index != self._plain and arm.behind < _LATER and not self._may_reach(index, best.rate):
            return 0.0
        if index != self._plain and (not arm.rounds or arm.behind >= _SPACING):
            scale = 1.0 if arm.scale is None else arm.scale
            if scale >= self._margins[index]:
                return best.rate * (1.0 + _TIE)  # even if all is accepted: asked last of all
            # What is due again comes after what was seen to be promising.
            due = best.rate * (1.0 + 2.0 * _TIE) if arm.rounds else math.inf
            return due if self._is_slow(arm) else max(due, self._possible_rate(arm))
        if self._is_slow(arm) and arm.behind < _WAIT * (arm.patience - 1.0):
            return 0.0
        if self._forecasts[index].parts <= self._forecasts[self._best].parts:
            return self._possible_rate(arm)
        tied = arm.rounds >= _WELL_KNOWN and arm.rate * (1.0 - _TIE) <= best.rate
        if tied and self._now - arm.last_seen < _TIED_ROUNDS:
            return 0.0
        return self._possible_rate(arm) * (1.0 - _TIE)

    def _may_reach(self, index: int, rate: float) -> bool:
        """Return whether an arm would be faster than this if all that it drafts were accepted."""
        arm, plain = self._arms[index], self._arms[self._plain]
        scale = 1.0 if arm.scale is None else arm.scale
        known, ceiling = self._ceilings.get(index, (None, 0.0))
        if known != scale:
            ceiling = self._forecasts[index].ceiling(scale)
            self._ceilings[index] = scale, ceiling
        return ceiling * plain.rate > rate

    def _worth_probing(self) -> int | None:
        best, arms = self._arms[self._best], self._arms
        if not best.rounds or not arms[self._plain].rounds:
            return None  # others are compared with these
        others = [index for index in range(len(arms)) if index != self._best]
        # Of those that promise alike the longest unseen comes first, of all the unknown the one
        # that would lose least: what it wins may pay for the others.
        hopes = sorted(
            (-self._hope(index), self._first_loss(index), -arms[index].behind, index)
            for index in others
        )
        room = spare = min(START + _PROBING * self._elapsed - self._lost, self._account.room)
        for hope, _, _, index in hopes:
            if -hope <= best.rate:
                return None
            loss = self._loss_of(index)
            if loss <= spare and self._fitting(index, self._probe_rounds(index)) is not None:
                return index
            pace = SHARE - self._reading_of_token(index)
            if loss <= room + pace * _SAVING:
                # The others must not use up what this one is being saved for.
                spare = min(spare, _SPARE * room)
        return None

    # -- what it costs -----------------------------------------------------------------------------

    def _first_loss(self, index: int) -> float:
        """Return how many plain rounds the first probe of an unknown arm would lose, else 0."""
        return 0.0 if self._arms[index].rounds else self._loss_of(index)

    @property
    def _best_rate(self) -> float:
        return self._arms[self._best].rate

    @property
    def _plain_seconds(self) -> float:
        """Seconds of a plain round, 0 before the first."""
        return self._arms[self._plain].mean_seconds or (
            self._run[0][1] if self._run and self._current == self._plain else 0.0
        )

    def _fitting(self, index: int, rounds: int = 1) -> int | None:
        """Return the longest draft of an arm (0: any) of which so many rounds fit the account.

        None if none does, whatever becomes of the drafts.
        """
        arm, plain = self._arms[index], self._arms[self._plain]
        if index == self._plain:
            return 0
        if not self._plain_seconds:
            return None
        won_back = _PAYBACK * max(0.0, 1.0 - plain.rate / arm.rate) if arm.rate else 0.0
        reading = max(0.0, self._reading(index) - self._credit - won_back)
        if self._shown(index, _CAUTION) > plain.rate and not reading:
            return arm.depth
        room = self._account.room - reading
        longest = arm.depth or self._forecasts[index].most
        depths = [arm.depth, *(1 << power for power in reversed(range(longest.bit_length())))]
        return next((depth for depth in depths if rounds * self._extra(index, depth) <= room), None)

    def _extra(self, index: int, depth: int) -> float:
        """Return the worst that such a round may lose, without reading, in plain rounds."""
        arm, forecast, plain = self._arms[index], self._forecasts[index], self._plain_seconds
        usual = arm.usual(True)
        if usual is not None and plain and depth == arm.depth:
            return max(0.0, usual / plain - 1.0)
        scale = 1.0 if arm.scale is None else arm.scale
        return scale * forecast.extra(depth or forecast.most)

    def _reading(self, index: int) -> float:
        """Return how many plain rounds it takes an arm to catch up with the text."""
        return self._reading_of_token(index) * self._arms[index].behind

    def _reading_of_token(self, index: int) -> float:
        measured, plain = self._arms[index].catch_up, self._plain_seconds
        if measured is not None and plain:
            return measured / plain
        return self._forecasts[index].draft * self._target_reading

    def _probe_rounds(self, index: int) -> int:
        return _SHORT_PROBE if self._arms[index].depth else _PROBE_ROUNDS

    def _loss_of(self, index: int) -> float:
        """Return how many plain rounds a probe is expected to lose against the best arm."""
        arm, plain = self._arms[index], self._arms[self._plain]
        a_round = 1.0 + self._extra(index, arm.depth)
        if arm.rounds:
            a_round = arm.mean_seconds / plain.mean_seconds
        # A round's time less that in which the best arm would yield its tokens.
        a_round -= arm.mean_tokens * plain.rate / self._best_rate
        reading = max(0.0, self._reading(index) - self._credit)
        return max(0.0, self._probe_rounds(index) * a_round) + reading
