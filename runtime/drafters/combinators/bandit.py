"""Arms of the bandit behind `auto`, and the ledger of their rounds."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrun.runtime.planning import (
    SHARES_OF_AUTO,
    STALL,
    TYPICAL_CPU,
    Account,
    CostCurve,
    lower_median,
)

# == Arms: the forecast of a drafter's rounds, and their measurements ==============================


# The weight of a round of an arm after its next one: estimates look back about 50 rounds.
_MEMORY = 0.98
# An arm in use has changed that lost more plain rounds than this and did not win them back: of one
# that gains .6 a round as luck will have it, once in 40,000 rounds. Rounds kept for it.
_CHANGED, _LAST = 10.0, 32
# The estimates of an arm's rounds before any was seen: their spread, and its weight.
_PRIOR_ROUNDS, _PRIOR_SPREAD, _PLAIN_SPREAD, _PRIOR_TOKENS = 2.0, 0.5, 0.1, 2.0


@dataclass(frozen=True, slots=True)
class ArmForecast:
    """The facts of an arm before its first round.

    `parts` measure its complexity: of equally fast arms the least is used. It drafts at most
    `most` tokens, each for `draft` times the target's cost of a token, which verifies at the
    costs of `curve`.
    """

    parts: int = 1
    most: int = 5
    draft: float = 0.0
    curve: CostCurve = TYPICAL_CPU

    def extra(self, nodes: int) -> float:
        """Return the time to draft and verify so many nodes, in plain rounds beyond one."""
        nodes = min(nodes, self.most)
        return self.curve.seconds(1 + nodes) / self.curve.seconds(1) - 1.0 + nodes * self.draft

    @property
    def target_reading(self) -> float:
        """The target's time to read a token of a prompt, in plain rounds."""
        batch = self.curve.sizes[-1]
        return self.curve.seconds(batch) / self.curve.seconds(1) / batch

    def deepest(self, stake: float) -> int:
        """Return 1, 2, 4, ...: the longest draft of at most this extra, 0 if that is any draft."""
        if self.extra(self.most) <= stake:
            return 0
        depth = 1
        while 2 * depth < self.most and self.extra(2 * depth) <= stake:
            depth *= 2
        return depth

    @property
    def margin(self) -> float:
        """How many times its extra the best draft is worth if all of it is accepted."""
        return max(depth / max(self.extra(depth), 1e-9) for depth in self._depths)

    def ceiling(self, scale: float) -> float:
        """Return the tokens of a plain round's time if all that is drafted were accepted.

        The time of drafting beyond a plain round is `scale` times the forecast.
        """
        return max((1.0 + depth) / (1.0 + scale * self.extra(depth)) for depth in self._depths)

    @property
    def _depths(self) -> set[int]:
        """Lengths of drafts: 1, 2, 4, ..., and the longest."""
        return {min(1 << power, self.most) for power in range(self.most.bit_length() + 1)}


@dataclass(slots=True)
class Arm:
    """The facts of one arm. Sums fade with `_MEMORY`, totals do not."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # of tokens - rate * seconds, round by round
    last_seen: int = 0
    behind: int = 0  # tokens of the text that it has not seen yet, and must catch up with
    catch_up: float | None = None  # the least seconds that each such token took
    patience: float = 1.0
    depth: int = 0  # the longest draft it may make, 0: without limit
    scale: float | None = None  # the least that drafting took, in forecasts
    last: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LAST))
    slump: float = 0.0  # their loss, in plain rounds
    recent: list[deque[float]] = field(default_factory=lambda: [deque(maxlen=9) for _ in range(2)])

    @property
    def rate(self) -> float:
        """Tokens per second, 0 if never seen."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def mean_seconds(self) -> float:
        """Seconds a round."""
        return self.seconds / self.rounds if self.rounds else 0.0

    @property
    def mean_tokens(self) -> float:
        """Tokens a round, 1 if never seen."""
        return self.tokens / self.rounds if self.rounds else 1.0

    def usual(self, drafted: bool) -> float | None:
        """Return the seconds of a usual round that drafted, or of one that did not."""
        # Plain rounds and drafting ones of one arm differ in time, so each kind has a median.
        recent = self.recent[drafted]
        return lower_median(recent) if recent else None

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        """Count a round, its time cut if something else disturbed it."""
        self.recent[drafted].append(seconds)
        seconds = min(seconds, STALL * (self.usual(drafted) or seconds))
        self.last.append((tokens, seconds))
        self._sum(tokens, seconds)

    def _sum(self, tokens: int, seconds: float) -> None:
        self.fade(_MEMORY)
        self.rounds += 1.0
        self.tokens += tokens
        self.seconds += seconds
        # Residuals of a ratio estimate: the standard error of the rate comes from them.
        self.squares += (tokens - self.rate * seconds) ** 2

    def fade(self, share: float) -> None:
        """Forget all but this share of the evidence; the rate stays."""
        self.rounds *= share
        self.tokens *= share
        self.seconds *= share
        self.squares *= share

    def notices_change(self, plain: float) -> bool:
        """Count the last rounds alone if they lost much against plain rounds of such seconds.

        The cumulative sum (Page 1954) of losses begins again when all was won back.
        """
        tokens, seconds = self.last[-1]
        self.slump = max(0.0, self.slump + seconds / plain - tokens)
        if self.slump > _CHANGED:
            self.fade(0.0)
            for tokens, seconds in self.last:
                self._sum(tokens, seconds)
        elif self.slump > 0.0:
            return False
        changed, self.slump = self.slump > 0.0, 0.0
        self.last.clear()
        return changed

    def for_another_text(self) -> Arm:
        """Return a copy of the facts that do not depend on the text."""
        recent = [deque(times, maxlen=times.maxlen) for times in self.recent]
        last: deque[tuple[int, float]] = deque(maxlen=_LAST)
        return dataclasses.replace(
            self, last_seen=0, behind=0, patience=1.0, last=last, recent=recent
        )

    def limit(self, depth: int) -> None:
        """Let it draft so many tokens at most; the time of longer or shorter drafts counts less."""
        if depth != self.depth:
            self.depth = depth
            self.recent[True].clear()
            self.fade(0.5)

    @property
    def error(self) -> float:
        """The standard error of the rate."""
        spread = _PRIOR_SPREAD if self.recent[True] or self.scale else _PLAIN_SPREAD
        # The prior stands in for spread that was not seen yet: two equal rounds prove little.
        prior = _PRIOR_ROUNDS * (spread * max(self.mean_tokens, _PRIOR_TOKENS)) ** 2
        variance = (self.squares + prior) / (self.rounds + _PRIOR_ROUNDS) / self.rounds
        return math.sqrt(variance) / self.mean_seconds


# == The ledger: time and tokens of each arm's rounds, and the losses ==============================
#
# Seconds are those of rounds as they were. Losses are counted in rounds of plain decoding (see
# `auto`). The first round of a run of an arm is counted when the second shows how much of it was
# catching up with the text.
#
# **Rounds without a choice.** To choose, and to collect the drafters' forecasts, takes a tenth of a
# millisecond a round, whatever the target takes for a token. That is a loss like that of drafts
# which are rejected. If nothing more may be lost, rounds of plain decoding follow without a choice
# (`Account.rest`). Something that repeats is then noticed some tokens later.


READING, PAYBACK = 0.15, 64  # of the target's time; tokens
STAKE = 0.5  # rounds of plain decoding that the first draft of an arm may lose
SEGMENT = 6  # rounds between decisions while the best arm is used, and counted in one go
# Tokens after which an arm is tried again whatever was found, and half of that is forgotten.
SPACING = 128
OPTIMISM = 1.5  # standard errors in an arm's favour
CAUTION = 0.5  # standard errors that a probed arm has to be better by to take the best one's place
# The relative standard deviation of a rate's change after so many rounds unseen.
_DRIFT, _DRIFT_ROUNDS = 0.1, 32
_MEASURABLE = 64  # tokens behind from which an arm's first round gives the cost of catching up
_TICK = 1e-9  # the shortest round: clocks may stand still


class ArmLedger:
    """The facts of all arms, and the losses; `ArmChooser` decides by it.

    `plain` is the arm that is plain decoding. `known` are the arms of an earlier text, whose rates
    are taken over. `account` may be that of earlier texts, too.
    """

    def __init__(
        self,
        forecasts: Sequence[ArmForecast],
        plain: int,
        *,
        known: Sequence[Arm] = (),
        account: Account | None = None,
    ) -> None:
        self._forecasts, self._plain = tuple(forecasts), plain
        self._first_depths = [forecast.deepest(STAKE) for forecast in forecasts]
        self._margins = [forecast.margin for forecast in forecasts]
        # Of each arm, its scale and the `ceiling` at it: a curve that is learnt moves little.
        self._ceilings: dict[int, tuple[float, float]] = {}
        self._target_reading = forecasts[plain].target_reading
        self._arms = [arm.for_another_text() for arm in known] or [
            Arm(depth=depth) for depth in self._first_depths
        ]
        self._arms[plain].depth = 0
        self._now = 0
        self._account = account or Account(SHARES_OF_AUTO)
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
        self._credit = READING * n_new * self._target_reading
        for arm in self._arms:
            arm.behind += n_new
            arm.patience = 1.0

    @property
    def arms(self) -> list[Arm]:
        """The facts of each arm."""
        self._count_waiting()
        return self._arms

    def record(
        self, index: int, tokens: int, seconds: float, drafted: int, choosing: float = 0.0
    ) -> None:
        """Count the result of a round of an arm that drafted so many nodes, chosen or replayed.

        `choosing` are those of its seconds in which nothing was evaluated. If nothing came of
        them, they are all that the round lost.
        """
        vain = choosing if index == self._plain or not drafted else 0.0
        if vain:
            self._account.lose(self._account.asking(vain, seconds - vain))
        if index == self._plain == self._current and len(self._run) > 1 and not self._probing:
            self._waiting.append((tokens, seconds))
            if len(self._waiting) == SEGMENT:
                self._count_waiting()
            return
        self._count_waiting()
        self._record(index, tokens, seconds, drafted, booked=vain > 0.0)

    def record_lent(self, index: int, tokens: int, seconds: float) -> None:
        """Book a round that an arm got for its forecast, while another is used.

        Its yield does not count for its other rounds.
        """
        self._count_waiting()
        self._finish_run()
        arm = self._arms[index]
        self._book(index, tokens, max(seconds, _TICK))
        self._now += 1
        self._account.allow(tokens)
        for other in self._arms:
            other.behind = 0 if other is arm else other.behind + tokens

    def rested(self, tokens: int) -> None:
        """Count rounds of plain decoding, a token each, without forecasts."""
        self._count_waiting()
        self._now += tokens
        self._account.allow(tokens)
        self._arms[self._plain].last_seen = self._now
        for index, arm in enumerate(self._arms):
            arm.behind = 0 if index == self._plain else arm.behind + tokens

    def _count_waiting(self) -> None:
        """Count the rounds of plain decoding that wait."""
        waiting, self._waiting = self._waiting, []
        for tokens, seconds in waiting:
            self._record(self._plain, tokens, seconds, 0)

    def _record(
        self, index: int, tokens: int, seconds: float, drafted: int, *, booked: bool = False
    ) -> None:
        if index != self._current:
            self._finish_run()
            self._current, self._left, self._probing = index, 0, False
        arm = self._arms[index]
        seconds = max(seconds, _TICK)
        self._run.append((tokens, seconds, drafted))
        if len(self._run) == 1:
            self._behind = arm.behind
            arm.fade(0.5 ** ((self._now - arm.last_seen) / SPACING))
        self._book(index, tokens, seconds, booked=booked)
        self._now += 1
        self._account.allow(tokens)
        # The first round includes catching up with the text; it is counted when a second one shows
        # the amount.
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

    def _book(self, index: int, tokens: int, seconds: float, *, booked: bool = False) -> None:
        """Count a round's time beyond plain decoding, and a probe's beyond the best arm.

        `booked` is a round that drafted nothing, whose loss was counted as that of choosing.
        """
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
            # A disturbance from outside is not the arm's loss, as far as it can be seen.
            seconds = min(seconds, STALL * (known + self._reading(index) * plain))
        self._elapsed += seconds / plain
        if index != self._plain and not booked:
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
                self._left = 0  # shorter drafts fitted when the probe began

    def _count_first(self, index: int, usual: float) -> None:
        """Count the first round of a run, without its time for catching up."""
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

    def _possible_rate(self, arm: Arm) -> float:
        """Return the rate that an arm may have, for all that is known."""
        if not arm.rounds:
            return math.inf
        unseen = (self._now - arm.last_seen) / (_DRIFT_ROUNDS * arm.patience)
        # A rate left unseen is taken to wander: the variance of a random walk grows with its steps.
        drift = _DRIFT * self._best_rate * math.sqrt(unseen)
        return arm.rate + OPTIMISM * math.hypot(arm.error, drift)

    # -- its costs ---------------------------------------------------------------------------------

    def _shown(self, index: int, caution: float) -> float:
        """Return the rate that an arm was shown to have, so many standard errors below the mean."""
        arm = self._arms[index]
        return arm.rate - caution * arm.error if arm.rounds else 0.0

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
        won_back = PAYBACK * max(0.0, 1.0 - plain.rate / arm.rate) if arm.rate else 0.0
        reading = max(0.0, self._reading(index) - self._credit - won_back)
        if self._shown(index, CAUTION) > plain.rate and not reading:
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
