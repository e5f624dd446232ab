"""`auto`: a bandit chooses the fastest drafter, round by round."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bindings.errors import FileMissingError, OptionError
from specrun.bindings.files import read_regular
from specrun.runtime.drafters.combinators.bandit import (
    CAUTION,
    SEGMENT,
    SPACING,
    Arm,
    ArmForecast,
    ArmLedger,
)
from specrun.runtime.drafters.combinators.members import MembersDrafter, outcome_for_idle
from specrun.runtime.planning import SHARES_OF_AUTO, START, Account
from specrun.runtime.round.drafter import NOTHING, Drafter, DraftRequest, Pause, RoundOutcome
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import DraftTree

# == A multi-armed bandit over rounds: the fastest arm, and the bounded loss of finding it =========
#
# An arm is a drafter, its reward tokens per second. The arm of the best measured rate is used.
# Others are probed while they may be better: their rate plus its uncertainty exceeds the best rate
# (optimism in the face of uncertainty: UCB, Auer et al. 2002), or as long as `SPACING` plain tokens
# take has passed, so that a drafter that becomes good is noticed.
#
# **Guarantee.** Time is counted in rounds of plain decoding, which are measured first. An
# account holds the time of all drafting rounds beyond plain rounds for the same tokens. A round
# drafts only if the worst that it may cost (its draft, and the wider evaluation of which nothing is
# accepted) fits the rest of the account (`planning.account`), or if the arm's own rounds were
# faster than plain ones; then it can lose its gain again. So n tokens take at most
#
#     n (1 + 2 SHARE) + START  rounds of plain decoding
#
# whatever is accepted, if rounds take the expected time: the measured time of drafts of that
# length, and before that an estimate from the models' sizes and the target's cost curve. A
# probe that costs more, because they are wrong, is lost once and stands in the account. Two things
# are outside of it. To read a prompt that only the target has read yet, drafters may take `READING`
# of the time that it took the target, and an arm that was measured faster as much as it wins back
# within `PAYBACK` tokens. And rounds that take several times as long as usual were disturbed by
# something else.
#
# Choosing takes time, too, in rounds of plain decoding as well: this time is booked as well, and
# drafting rounds are compared with plain rounds as they are.
#
# An arm that is new, or was found slower than plain decoding, drafts few tokens at first, as many
# as stake `STAKE` of a plain round (or one), and twice as many each time half of a draft is
# accepted. Its reading of the text is part of a probe: one that reads slower than a share allows,
# about a seventh of the target's size on a CPU, cannot come back into a long text.
#
# An arm that reads the text alone may forecast a speed-up of a single round. If it is more than
# the arm in use yields, and anything may be lost, that round is given to it (`promising`), and its
# draft is not limited: such a draft alone need not fit the account, and is booked like any other.


_PROBING = 0.025  # of the time so far, which probes may lose against the best arm, beside START
# An arm that could not be the best even if all of its drafts were accepted waits for so many.
_LATER = 512
# Rounds after which an arm that is alike but more complicated is known, and left alone for.
_WELL_KNOWN, _TIED_ROUNDS = 16.0, 256
_MAX_PATIENCE, _WAIT = 8, 16  # after 1, 2, 3 vain probes an arm waits for 16, 48, 112 tokens
_FIRST_ROUNDS = 2  # of plain decoding, before others are looked at
_PROBE_ROUNDS, _SHORT_PROBE = 4, 2  # short: of an arm whose drafts are limited
_FAST = 1.5  # a forecast speed-up for which a round of plain decoding is given up
_TIE = 0.03  # rates that differ by less than this share are alike: the simpler arm is taken
_SAVING = 512  # tokens in which the possible loss of a probe is saved up, if it can be at all
_SPARE = 0.1  # of all that may be lost: the limit of a probe while others are being saved for


class ArmChooser(ArmLedger):
    """Chooses an arm and the length of its draft for each round; learns from tokens and seconds.

    Plain decoding is the first to be used.
    """

    @property
    def has_room(self) -> bool:
        """Whether anything may be lost to drafting now; after some rounds, only the booked time."""
        known = self._now < _FIRST_ROUNDS or self._plain_seconds > 0.0
        return known and self._account.room > 0.0

    def choose(self) -> tuple[int, int]:
        """Return the arm of the next round, and how much it may draft (0: without limit)."""
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

        `promised` are the speed-ups over plain decoding that the arms forecast for this round
        alone. None if no forecast is better than the estimate of `index`, or may be if it is
        probed; `index` itself if its own is the best, and no draft need be limited.
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
        """How many rounds of plain decoding come next without a choice."""
        drafts = self._current != self._plain or self._probing
        return 0 if drafts else self._account.rest()

    # -- deciding ----------------------------------------------------------------------------------

    def _decide(self) -> None:
        if self._probing:  # a probe in vain lets its arm wait longer
            arm = self._arms[self._current]
            better = arm.rate > self._best_rate
            arm.patience = 1.0 if better else min(_MAX_PATIENCE, 2.0 * arm.patience)
        if self._arms[self._plain].rounds:
            self._best = self._simplest_of_the_best()
            # Arms that are slower than plain decoding begin again with short drafts.
            for arm, first in zip(self._arms, self._first_depths, strict=True):
                if self._is_slow(arm):
                    arm.limit(first)
        probed = self._worth_probing()
        self._probing = probed is not None
        chosen = self._best if probed is None else probed
        depth = self._fitting(chosen, self._probe_rounds(chosen) if self._probing else 1)
        if depth is None:
            chosen, depth = self._plain, 0
        # Rounds of a run are alike: the first is counted by the time of the second.
        if chosen != self._current or depth != self._arms[chosen].depth:
            self._finish_run()
            self._current = chosen
        self._arms[chosen].limit(depth)
        self._left = SEGMENT
        if self._probing:
            self._left = self._probe_rounds(chosen)
        elif not self._arms[self._plain].rounds:
            self._left = _FIRST_ROUNDS

    def _simplest_of_the_best(self) -> int:
        """Return the arm of the best shown rate, or a simpler one that is as good as that."""

        def shown(index: int) -> float:
            # The best need not show anything more; others must be better by some caution.
            return self._shown(index, 0.0 if index == self._best else CAUTION)

        arms = range(len(self._arms))
        best = max(arms, key=shown)
        enough = (1.0 - _TIE) * self._arms[best].rate
        seen = [index for index in arms if self._arms[index].rounds or index == best]
        alike = [index for index in seen if index == best or self._arms[index].rate >= enough]

        def order(index: int) -> tuple[int, bool, float, int]:
            parts, rate = self._forecasts[index].parts, self._arms[index].rate
            return parts, index != best, -rate, index

        return min(alike, key=order)

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
                return best.rate * (1.0 + _TIE)  # even if all is accepted: last of all
            # Arms that are due again come after promising ones.
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
        """Return the best arm's speed over plain decoding, at least 1."""
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
        # Of equal forecasts the longest unseen comes first, of all the unknown the one
        # that would lose least: its gain may pay for the others.
        hopes = []
        for index in others:
            loss = 0.0 if arms[index].rounds else self._loss_of(index)
            hopes.append((-self._hope(index), loss, -arms[index].behind, index))
        hopes.sort()
        room = spare = min(START + _PROBING * self._elapsed - self._lost, self._account.room)
        for hope, _, _, index in hopes:
            if -hope <= best.rate:
                return None
            loss = self._loss_of(index)
            if loss <= spare and self._fitting(index, self._probe_rounds(index)) is not None:
                return index
            pace = self._account.share - self._reading_of_token(index)
            if loss <= room + pace * _SAVING:
                # The others must not use up the savings for this one.
                spare = min(spare, _SPARE * room)
        return None

    # -- its costs ---------------------------------------------------------------------------------

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


# == The drafter, and the log of its choices =======================================================
#
# The choice of a round depends on the tokens and the times of earlier rounds only, so the text
# keeps the target's distribution whatever is chosen. Times are measured, so another run may choose
# otherwise: every choice is logged, and a log can be replayed.


_MAX_ROUNDS = 1 << 24


@dataclass(slots=True)
class ChoiceLog:
    """Choices among `names` as runs of [index, rounds]; `totals` are rounds, tokens and seconds.

    `depths` are runs of [tokens, rounds]: how deep the chosen might draft, 0 if it was free.
    `asks` are runs of [0 or 1, rounds]: whether the others made forecasts, which teaches them.
    """

    names: Sequence[str]
    runs: list[list[int]] = field(default_factory=list)
    depths: list[list[int]] = field(default_factory=list)
    asks: list[list[int]] = field(default_factory=list)
    n_rounds: int = 0
    totals: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals = [[0, 0, 0.0] for _ in self.names]

    def add(
        self,
        index: int,
        depth: int,
        n_tokens: int,
        seconds: float,
        *,
        asked: bool = False,
        rounds: int = 1,
    ) -> None:
        """Note a round, or several that were alike."""
        noted = ((self.runs, index), (self.depths, depth), (self.asks, int(asked)))
        for runs, value in noted:
            if runs and runs[-1][0] == value:
                runs[-1][1] += rounds
            else:
                runs.append([value, rounds])
        self.n_rounds += rounds
        total = self.totals[index]
        total[0] += rounds
        total[1] += n_tokens
        total[2] += seconds

    def choices_for(self, names: Sequence[str]) -> list[tuple[int, int, int]]:
        """Return index, depth and whether others made forecasts, of each round.

        Raises `OptionError` for other drafters' logs.
        """
        if list(names) != list(self.names):
            raise OptionError(
                f"auto: the log was made with {', '.join(self.names)} and cannot be replayed "
                f"with {', '.join(names)}"
            )
        choices, depths, asks = (
            [value for value, rounds in runs for _ in range(rounds)]
            for runs in (self.runs, self.depths, self.asks)
        )
        count = len(choices)
        return list(itertools.zip_longest(choices, depths[:count], asks[:count], fillvalue=0))

    def to_dict(self) -> dict[str, Any]:
        """Return statistics and log, ready for JSON."""
        arms = [
            {
                "drafter": name,
                "rounds": int(rounds),
                "tokens": int(tokens),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds if seconds > 0.0 else None,
            }
            for name, (rounds, tokens, seconds) in zip(self.names, self.totals, strict=True)
        ]
        kinds = {"choices": self.runs, "depths": self.depths, "asks": self.asks}
        return {"arms": arms, **{kind: [list(run) for run in kinds[kind]] for kind in kinds}}


def read_choice_logs(path: Path) -> list[ChoiceLog]:
    """Return the logs of a file: JSON objects as `generate --json` prints them, one an answer.

    Raises `FileMissingError` or `OptionError` for files that hold none.
    """
    try:
        text = read_regular(path).decode()
    except (FileNotFoundError, NotADirectoryError):
        problem = "does not exist: give a file that generate --json wrote"
        raise FileMissingError(f"{path} {problem}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read as a log of choices: {error}") from None
    advice = "give the text that generate --json printed with --drafter auto"
    decoder, logs, position = json.JSONDecoder(), list[ChoiceLog](), 0
    while rest := text[position:].lstrip():
        try:
            value, length = decoder.raw_decode(rest)
            logs.append(_log_of(value))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OptionError(f"{path} is not a log of choices: {advice}") from None
        position = len(text) - len(rest) + length
    if not logs:
        raise OptionError(f"{path} is empty: {advice}")
    return logs


def _log_of(value: Any) -> ChoiceLog:  # noqa: ANN401 - whatever a file holds
    """Return the log in a result, in its statistics, or by itself."""
    for name in ("stats", "drafting"):
        if not isinstance(value, Mapping):
            raise ValueError
        value = value.get(name, value)
    names, runs = [arm["drafter"] for arm in value["arms"]], value["choices"]
    depths, asks = value.get("depths", []), value.get("asks", [])
    if not all(isinstance(name, str) for name in names):
        raise ValueError
    for kind, most in ((runs, len(names)), (depths, _MAX_ROUNDS), (asks, 2)):
        for number, rounds in kind:
            if not (isinstance(number, int) and 0 <= number < most):
                raise ValueError
            if not (isinstance(rounds, int) and rounds > 0):
                raise ValueError
        if sum(rounds for _, rounds in kind) > _MAX_ROUNDS:
            raise ValueError
    runs, depths, asks = ([list(run) for run in kind] for kind in (runs, depths, asks))
    return ChoiceLog(names, runs, depths, asks)


_VAIN = 32
"""Lower forecasts in a row, after which they are made only every second round:
repetitions are noticed a token later, and a round that drafts nothing costs less."""

Clock = Callable[[], float]
"""Returns seconds from any fixed moment on."""


@dataclass(slots=True)
class _Rest:
    """Rounds of plain decoding without a choice: how many are to come, and those that were.

    Each is a token. `text` is the live list of these.
    """

    left: int = 0
    rounds: int = 0
    seconds: float = 0.0
    text: Sequence[int] = ()

    def count(self, rounds: int, seconds: float) -> None:
        """Count rounds of which each took so many seconds."""
        self.left -= rounds
        self.rounds += rounds
        self.seconds += rounds * seconds


class AutoDrafter(MembersDrafter):
    """Drafts with the member that `ArmChooser` picks for the round; one of them should be `none`.

    A round's time runs from the request for a draft to the end of `observe`: drafting, verification
    and the drafters' learning, not the work of a stream's consumer between rounds. Members observe
    every round, except those that find its text themselves. One that was not used catches up when
    it is used again, which is part of its time. `forecasts` are the members' known costs. `shared`
    are the measurements of another conversation with the same weights: a new one begins with them,
    and they are filled again when an answer ends. A round of plain decoding does as little as
    possible: that is all that `auto` costs if nothing pays. If it is more than a token allows, and
    all members find the text themselves, some rounds follow without a choice.
    """

    def __init__(
        self,
        members: Sequence[Drafter],
        *,
        replay: Sequence[ChoiceLog] = (),
        clock: Clock = time.perf_counter,
        forecasts: Sequence[ArmForecast] = (),
        shared: list[Arm] | None = None,
        name: str = "auto",
    ) -> None:
        if len(members) < 2:
            problem = "there is nothing to choose from; name at least one drafter beside none"
            raise OptionError(f"{name}: {problem}")
        super().__init__(members, name=name)
        self.keeps_rows = False  # which member speaks would depend on a clock
        self.max_leaves = max(member.max_leaves for member in members)
        self.max_nodes = max(member.max_nodes for member in members)
        # Of the largest: only one of them runs at a time.
        self.n_params = max(member.n_params for member in members)
        self.depth_params = max(member.depth_params for member in members)
        self._names = [member.name for member in members]
        for log in replay:
            log.choices_for(self._names)  # a log of other drafters is refused at once
        self._plain = self._names.index("none") if "none" in self._names else 0
        unknown = (ArmForecast(most=max(1, member.max_nodes)) for member in members)
        self._forecasts = tuple(forecasts) or tuple(unknown)
        self._shared = [] if shared is None else shared
        self._account = Account(SHARES_OF_AUTO)
        self._may_rest = all(each.finds_text or not each.max_nodes for each in members)
        self._rest, self.pause = _Rest(), Pause()
        self._chooser = self._new_chooser()
        self._has_measured = False
        self._clock = clock
        self._replay = list(replay)
        self._replayed: list[tuple[int, int, int]] = []
        self._log = ChoiceLog(self._names)
        self._known: list[int] = []
        self._chosen: int | None = None
        self._vain = 0  # forecasts in a row that were too low
        self._depth = 0
        self._promised: list[float] = []  # forecasts of this round, by the members that made one
        self._lent = False  # the round is one that another drafter's turn was interrupted for
        self._started = self._proposed = 0.0
        self._counting = 0.0  # seconds in which the round before was counted

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer: measured arms are kept and seen again sooner; no `tokens`: dropped."""
        super().begin(tokens)
        self._count_rest()  # it goes on: the possible loss is saved up over texts
        self._share()
        if not tokens:
            self._has_measured, self._shared = False, []
        if not self._has_measured:
            self._chooser = self._new_chooser()
        self._chooser.begin(len(tokens) - common_prefix(self._known, tokens))
        self._known = list(tokens)
        self._log = ChoiceLog(self._names)
        self._chosen = None
        self._promised = []  # an answer may have ended between a draft and its outcome
        self._vain = 0
        if self._replay:
            self._replayed = self._replay.pop(0).choices_for(self._names)
            self._rest.left = 0  # its choices are the log's

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the proposal of the member that is likely fastest."""
        self._started = self._clock()
        self._end_pause()
        if self._rest.left:
            return NOTHING
        if self._rest.rounds:
            self._count_rest()
        n_rounds = self._log.n_rounds
        if n_rounds < len(self._replayed):
            self._chosen, self._depth, asked = self._replayed[n_rounds]
            self._lent = False
            if asked:
                self._ask(request, self._members[self._chosen])
        else:
            self._chosen, self._depth = self._choose(request)
        if self._depth:
            request = request.within(self._depth, self._depth)
        tree = self._members[self._chosen].propose(request)
        self._proposed = self._clock()
        return tree

    def _choose(self, request: DraftRequest) -> tuple[int, int]:
        """Return the chooser's choice, or instead of it a member with a higher forecast."""
        index, depth = self._chooser.choose()
        self._lent = False
        if not self._chooser.has_room or not self._asks():
            return index, depth
        # Members that read only the text know without a probe whether they have a draft. The chosen
        # one makes its draft itself, unless that would be shorter than its plan.
        chosen = self._members[index]
        self._ask(request, None if depth else chosen)
        if not depth and max(self._promised) > 1.0:
            self._promised[index] = chosen.forecast(request)
        found = self._chooser.promising(index, self._promised)
        if found is None:
            self._vain -= not any(self._promised)  # only the chosen one could draft
            return index, depth
        self._vain = 0
        self._lent = index not in (found, self._plain)
        return found, 0

    def _ask(self, request: DraftRequest, chosen: Drafter | None) -> None:
        """Collect the forecasts of all members but the chosen one."""
        self._promised = [
            0.0 if member is chosen else member.forecast(request) for member in self._members
        ]

    def _asks(self) -> bool:
        """Return whether this round collects forecasts."""
        self._vain += 1
        return self._vain <= _VAIN or self._vain % 2 == 0

    def observe(self, outcome: RoundOutcome) -> None:
        """Pass the outcome on: the chosen member sees its tree, the others the text alone."""
        if self._rest.left:
            self._sleep(outcome)
            return
        evaluated = self._clock() - self._proposed
        for index, member in enumerate(self._members):
            if index == self._chosen:
                member.observe(outcome)
            elif not member.finds_text or (self._promised and self._promised[index]):
                # The text without rows: caches follow when their drafters draft again, and a
                # drafter with a forecast receives the outcome.
                member.observe(outcome_for_idle(outcome))
        asked, self._promised = bool(self._promised), []
        self._known += outcome.tokens[len(self._known) :]
        if self._chosen is None:
            return
        # Read after all have learnt: the cost of an idle member is part of the choice.
        ended = self._clock()
        seconds = ended - self._started
        self._has_measured = True
        new, drafted = outcome.n_new, len(outcome.tree)
        choosing = seconds - evaluated + self._counting
        if self._chosen != self._plain and not self._members[self._chosen].finds_text:
            choosing = 0.0  # it was the member's model that took the time
        if self._lent:
            self._chooser.record_lent(self._chosen, new, seconds + self._counting)
        else:
            self._chooser.record(self._chosen, new, seconds + self._counting, drafted, choosing)
        self._log.add(self._chosen, self._depth, new, seconds, asked=asked)
        if self._may_rest and self._log.n_rounds >= len(self._replayed):
            self._rest.left = self._chooser.rest
        self._chosen = None
        self._counting = self._clock() - ended

    def _sleep(self, outcome: RoundOutcome) -> None:
        """Note a round without a choice, which no member observes: all find the text."""
        rest = self._rest
        rest.count(1, self._clock() - self._started)
        rest.text = outcome.tokens
        # Of the next ones nobody has to tell, either: to be called takes more than all the rest.
        self.pause.begin(rest.left)

    def _end_pause(self) -> None:
        """Count the rounds in which it was not called: they took as long as others of that run."""
        lasted, rest = self.pause.end(), self._rest
        if lasted:
            rest.count(lasted, rest.seconds / rest.rounds)

    def _count_rest(self) -> None:
        """Take the rounds without a choice into the account and the log."""
        self._end_pause()
        rest = self._rest
        if rest.rounds:
            self._known += rest.text[len(self._known) :]
            self._chooser.rested(rest.rounds)
            self._log.add(self._plain, 0, rest.rounds, rest.seconds, rounds=rest.rounds)
            self._rest = _Rest(rest.left)

    def _share(self) -> None:
        """Leave the measurements to other conversations."""
        if self._has_measured:
            self._shared[:] = self._chooser.arms

    def _new_chooser(self) -> ArmChooser:
        return ArmChooser(self._forecasts, self._plain, known=self._shared, account=self._account)

    def close(self) -> None:
        """Close all members; measurements stay with the weights."""
        self._count_rest()
        self._share()
        super().close()

    def rewind(self, length: int) -> None:
        """Pass on."""
        del self._known[length:]
        super().rewind(length)

    def report(self) -> dict[str, Any]:
        """Return how often each member was chosen, its speed, and the choices, to be replayed."""
        self._count_rest()
        return {**self._log.to_dict(), **super().report()}
