"""A multi-armed bandit over rounds: the fastest way to decode, and what may be lost to find it.

An arm is a drafter, its reward tokens per second. The arm of the best measured rate is used. Others
are probed while they may be better: their rate plus its uncertainty exceeds the best rate (optimism
in the face of uncertainty: UCB, Auer et al. 2002), or as long as `SPACING` plain tokens take has
passed, so that a drafter that becomes good is noticed.

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
`READING` of the time that it took the target, and an arm that was measured faster what it wins
back within `PAYBACK` tokens. And rounds that take several times as long as usual were disturbed
by something else.

Choosing takes time, too, in rounds of plain decoding as well: what it takes there has an account
of its own (`Resting`), and drafting rounds are compared with plain rounds as they are.

An arm that is new, or was found slower than plain decoding, drafts few tokens at first, as many as
stake `STAKE` of a plain round (or one), and twice as many each time half of a draft is accepted.
Its reading of the text is part of a probe: one that reads slower than `SHARE` allows, about a
seventh of the target's size on a CPU, cannot come back into a long text.

An arm that reads the text alone may promise a speed-up of a single round. Where it is more than the
arm in use yields, and anything may be lost, that round is given to it (`promising`), and its draft
is not limited: such a draft alone need not fit the account, and is booked like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrun.runtime.costs import START
from specrun.runtime.drafters.combinators.arm_ledger import (
    CAUTION,
    SEGMENT,
    SHARE,
    SPACING,
    ArmLedger,
)
from specrun.runtime.drafters.combinators.arms import Arm

_PROBING = 0.025  # of the time so far, which probes may lose against the best arm, beside START
# An arm that could not be the best even if all of its drafts were accepted waits for so many.
_LATER = 512
# Rounds after which an arm that is alike but more complicated is known, and left alone for.
_WELL_KNOWN, _TIED_ROUNDS = 16.0, 256
_MAX_PATIENCE, _WAIT = 8, 16  # after 1, 2, 3 vain probes an arm waits for 16, 48, 112 tokens
_FIRST_ROUNDS = 2  # of plain decoding, before others are looked at
_PROBE_ROUNDS, _SHORT_PROBE = 4, 2  # short: of an arm whose drafts are limited
_FAST = 1.5  # a promised speed-up for which a round of plain decoding is given up
_TIE = 0.03  # rates that differ by less than this share are alike: the simpler arm is taken
_SAVING = 512  # tokens in which what a probe may lose is saved up, if it can be at all
_SPARE = 0.1  # of all that may be lost: what a probe may take while others are being saved for


class ArmChooser(ArmLedger):
    """Chooses an arm and the length of its draft for each round; learns from tokens and seconds.

    Plain decoding is the first to be used.
    """

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

    def promising(self, index: int, promised: Sequence[float]) -> int | None:
        """Return the arm that is worth more in this round than `index`, which was chosen.

        `promised` are the speed-ups over plain decoding that the arms promise for this round alone.
        None where no promise is better than what is known of `index`, or may be where it is
        probed; `index` itself where its own is the best, and no draft need be limited.
        """
        most = max(promised)
        if most < _FAST:
            return None
        if promised[index] == most:
            return index
        arm, plain = self._arms[index], self._arms[self._plain]
        if index == self._plain or not plain.rounds:
            return promised.index(most)
        yields = self._possible_rate(arm) if self._probing else arm.rate
        return promised.index(most) if most >= (1.0 + _TIE) * yields / plain.rate else None

    @property
    def rest(self) -> int:
        """For how many rounds of plain decoding nobody is to be asked from now on."""
        drafts = self._current != self._plain or self._probing
        return 0 if drafts else self._resting.rounds()

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
        self._left = SEGMENT
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

    def _shown_rate(self, index: int) -> float:
        """Return the rate that an arm is ranked by; the best need not show anything more."""
        return self._shown(index, 0.0 if index == self._best else CAUTION)

    def _is_slow(self, arm: Arm) -> bool:
        """Return whether an arm was shown to be slower than plain decoding."""
        rate = self._arms[self._plain].rate
        return arm.rounds > 0.0 and arm.rate + CAUTION * arm.error < rate

    def _hope(self, index: int) -> float:
        """Return the rate that an arm may have; a more complicated one must be better by a tie."""
        arm, best = self._arms[index], self._arms[self._best]
        if index != self._plain and arm.behind < _LATER and not self._may_reach(index, best.rate):
            return 0.0
        if index != self._plain and (not arm.rounds or arm.behind >= SPACING * self._speed_up):
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

    @property
    def _speed_up(self) -> float:
        """Return what the best arm gains over plain decoding, at least 1."""
        plain = self._arms[self._plain].rate
        return max(1.0, self._best_rate / plain) if plain else 1.0

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
