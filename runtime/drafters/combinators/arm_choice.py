"""A multi-armed bandit over rounds: the fastest way to decode, with a budget for exploration.

An arm is a drafter, its reward tokens per second. The arm of the best measured rate is used. Others
are probed, a few rounds at a time, while they may be better: their rate plus its uncertainty, which
grows with the rounds since they were last seen, exceeds the best rate (optimism in the face of
uncertainty: UCB, Auer et al. 2002). What makes it safe is the account: the time that probes have
lost against the best arm never exceeds a small share of all time, so text on which nothing pays
costs little more than plain decoding. Every probe that changes nothing doubles the time until the
arm seems worth another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# The weight of a round of an arm after its next one: estimates look back about 100 rounds.
_MEMORY = 0.99
# What is believed of an arm's rounds before they were seen: their spread, and its weight.
_PRIOR_ROUNDS, _PRIOR_SPREAD, _PLAIN_SPREAD, _PRIOR_TOKENS = 2.0, 0.5, 0.1, 2.0
# Rounds that take more than so many medians of their arm were disturbed, and count as so many.
_STALL = 2.0


@dataclass(slots=True)
class Arm:
    """What is known of one arm. Sums fade with `_MEMORY`, totals do not."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # of tokens - rate * seconds, round by round
    last_seen: int = 0
    behind: int = 0  # tokens of the text that it has not seen yet, and must catch up with
    catch_up: float | None = None  # seconds for each such token, once measured
    patience: float = 1.0
    ever_drafted: bool = False
    recent: list[deque[float]] = field(default_factory=lambda: [deque(maxlen=9) for _ in range(2)])

    @property
    def rate(self) -> float:
        """Tokens per second, 0 if never seen."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def mean_seconds(self) -> float:
        """Seconds a round."""
        return self.seconds / self.rounds if self.rounds else 0.0

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        """Count a round, its time cut where something else disturbed it."""
        # Plain rounds and drafting ones of one arm differ in
        # time, so each kind has a median of its own.
        recent = self.recent[drafted]
        recent.append(seconds)
        usual = sorted(recent)[(len(recent) - 1) // 2]
        seconds = min(seconds, _STALL * usual)
        self.rounds = self.rounds * _MEMORY + 1.0
        self.tokens = self.tokens * _MEMORY + tokens
        self.seconds = self.seconds * _MEMORY + seconds
        # Residuals of a ratio estimate: the standard error of the rate comes from them.
        self.squares = self.squares * _MEMORY + (tokens - self.rate * seconds) ** 2
        self.ever_drafted = self.ever_drafted or drafted

    @property
    def error(self) -> float:
        """The standard error of the rate."""
        mean = self.tokens / self.rounds
        spread = _PRIOR_SPREAD if self.ever_drafted else _PLAIN_SPREAD
        # The prior stands in for spread that was not seen yet: two equal rounds prove little.
        prior = _PRIOR_ROUNDS * (spread * max(mean, _PRIOR_TOKENS)) ** 2
        variance = (self.squares + prior) / (self.rounds + _PRIOR_ROUNDS) / self.rounds
        return math.sqrt(variance) / self.mean_seconds


_OPTIMISM, _EARLY_OPTIMISM = 1.5, 4.0  # standard errors in an arm's favour; while trying is free
_CAUTION = 0.5  # standard errors that a probed arm has to be better by to take the best one's place
_AHEAD = 1.2  # from this speed-up on, the best arm may spend more on looking for a better one
# The relative standard deviation of a rate's change after so many rounds unseen.
_DRIFT, _DRIFT_ROUNDS = 0.1, 32
# Rounds after which an arm that is alike but more complicated is known, and left alone for.
_WELL_KNOWN, _TIED_ROUNDS = 16.0, 256
_MAX_PATIENCE, _PROBE_ROUNDS = 8, 4
_FIRST_ROUNDS = 2  # of the first arm before others are looked at: enough to compare them with
_TIE = 0.03  # rates that differ by less than this share are alike: the simpler arm is taken
_SEGMENT = 4  # rounds between decisions while the best arm is used
_MEASURABLE = 16  # tokens behind from which an arm's first round tells what catching up costs
_TICK = 1e-9  # the shortest round: clocks may stand still
_OUT_OF_REACH = 2.0  # a probe that would lose so many times all that may be lost is not waited for
_SPARE = 0.02  # of all that may be lost: what a probe may take while others are being saved for


class ArmChooser:
    """Chooses an arm for each round, and learns from its tokens and seconds.

    `plain` is the arm that is plain decoding. For `free_tokens` of the first text anything may be
    tried; after that probes may lose no more than `budget` of all time, and `budget_ahead` where
    the best arm is well ahead of plain. The first arm is the first to be used. `sizes` say how
    complicated arms are: of equally fast ones the least is used.
    """

    def __init__(
        self,
        n_arms: int,
        plain: int,
        *,
        sizes: Sequence[int] = (),
        free_tokens: int = 64,
        budget: float = 0.01,
        budget_ahead: float = 0.03,
    ) -> None:
        self.arms = [Arm() for _ in range(n_arms)]
        self._free_tokens, self._plain = free_tokens, plain
        self._sizes = sizes or (1,) * n_arms
        self._budget, self._budget_ahead = budget, budget_ahead
        self._now = self._tokens = 0
        self._elapsed = self._lost = 0.0
        self._best = self._current = self._left = 0
        self._probing = False
        # Tokens, seconds and whether anything was drafted, of the rounds since the arm changed.
        self._run: list[tuple[int, float, bool]] = []
        self._behind = 0  # how far the arm was behind when that run began

    def begin(self, n_new: int) -> None:
        """Start another text, `n_new` tokens of which are new to all arms."""
        self._finish_run()
        self._left = 0
        for arm in self.arms:
            arm.behind += n_new
            arm.patience = 1.0

    @property
    def is_new(self) -> bool:
        """Whether nothing was measured yet."""
        return self._now == 0

    def start_with(self, index: int) -> None:
        """Use this arm first, where nothing was measured yet."""
        if self.is_new:
            self._best = index

    def choose(self) -> int:
        """Return the arm of the next round."""
        if self._left <= 0:
            self._decide()
        self._left -= 1
        return self._current

    def record(self, index: int, tokens: int, seconds: float, drafted: bool) -> None:
        """Learn what a round of an arm gave, the chosen one or, in a replay, another."""
        if index != self._current:
            self._finish_run()
            self._current, self._left, self._probing = index, 0, False
        arm = self.arms[index]
        seconds = max(seconds, _TICK)
        self._now += 1
        self._tokens += tokens
        self._elapsed += seconds
        best = self.arms[self._best]
        # Early tokens are free: nothing is counted against the budget until they are used up.
        if self._tokens > self._free_tokens and self._probing and best.rate:
            # Loss is the time beyond what the best arm would have taken for the same tokens.
            self._lost = max(0.0, self._lost + seconds - tokens / best.rate)
        self._run.append((tokens, seconds, drafted))
        if len(self._run) == 1:
            self._behind = arm.behind
        # The first round includes catching up with the text; it
        # is counted when a second tells how much.
        else:
            if len(self._run) == 2:
                self._count_first(arm, seconds)
            arm.add(tokens, seconds, drafted)
        arm.last_seen = self._now
        for other in self.arms:
            other.behind = 0 if other is arm else other.behind + tokens
        if self._probing and len(self._run) > 2 and self._possible_rate(arm) < best.rate:
            self._left = 0  # it is hopeless

    def _count_first(self, arm: Arm, usual: float) -> None:
        """Count the first round of a run, but not what of it was catching up."""
        tokens, seconds, drafted = self._run[0]
        usual = arm.mean_seconds or usual
        if self._behind >= _MEASURABLE:
            excess = max(0.0, seconds - usual) / self._behind
            # The least that was ever measured: disturbances from outside only add.
            arm.catch_up = excess if arm.catch_up is None else min(arm.catch_up, excess)
        arm.add(tokens, min(seconds, usual), drafted)

    def _finish_run(self) -> None:
        """Count a run that ended after its first round."""
        if len(self._run) == 1:
            self._count_first(self.arms[self._current], self._run[0][1])
        self._run.clear()

    def _decide(self) -> None:
        if self._probing:
            self._judge_probe()
        self._best = self._simplest_of_the_best()
        probed = self._worth_probing()
        self._probing = probed is not None
        chosen = self._best if probed is None else probed
        if chosen != self._current:
            self._finish_run()
            self._current = chosen
        usual = _PROBE_ROUNDS if self._probing else _SEGMENT
        self._left = _FIRST_ROUNDS if self.is_new else usual

    def _simplest_of_the_best(self) -> int:
        """Return the arm of the best shown rate, or a simpler one that is as good as that."""
        arms = range(len(self.arms))
        if self.is_new:
            return self._best
        best = max(arms, key=self._shown_rate)
        enough = (1.0 - _TIE) * self.arms[best].rate
        seen = [index for index in arms if self.arms[index].rounds or index == best]
        alike = [index for index in seen if index == best or self.arms[index].rate >= enough]

        def order(index: int) -> tuple[int, bool, float, int]:
            return self._sizes[index], index != best, -self.arms[index].rate, index

        return min(alike, key=order)

    def _judge_probe(self) -> None:
        arm, best = self.arms[self._current], self.arms[self._best]
        arm.patience = 1.0 if arm.rate > best.rate else min(_MAX_PATIENCE, 2.0 * arm.patience)

    def _shown_rate(self, index: int) -> float:
        """Return the rate that an arm was shown to have; the best need not show anything more."""
        arm = self.arms[index]
        if not arm.rounds or index == self._best:
            return arm.rate
        return arm.rate - _CAUTION * arm.error

    def _possible_rate(self, arm: Arm) -> float:
        """Return the rate that an arm may have, for all that is known."""
        if not arm.rounds:
            return math.inf
        unseen = (self._now - arm.last_seen) / (_DRIFT_ROUNDS * arm.patience)
        # A rate left unseen is taken to wander: the variance of a random walk grows with its steps.
        drift = _DRIFT * self.arms[self._best].rate * math.sqrt(unseen)
        optimism = _EARLY_OPTIMISM if self._tokens < self._free_tokens else _OPTIMISM
        return arm.rate + optimism * math.hypot(arm.error, drift)

    def _hope(self, index: int) -> float:
        """Return the rate that an arm may have; a more complicated one must be better by a tie."""
        arm, best = self.arms[index], self.arms[self._best]
        if self._sizes[index] <= self._sizes[self._best]:
            return self._possible_rate(arm)
        tied = arm.rounds >= _WELL_KNOWN and arm.rate * (1.0 - _TIE) <= best.rate
        if tied and self._now - arm.last_seen < _TIED_ROUNDS:
            return 0.0
        return self._possible_rate(arm) * (1.0 - _TIE)

    def _worth_probing(self) -> int | None:
        best, allowance = self.arms[self._best], self._allowance()
        if not best.rounds:
            return None  # the first arm is what is likely to be best: others are compared with it
        others = [index for index, arm in enumerate(self.arms) if arm is not best]
        hopes = sorted((-self._hope(index), index) for index in others)
        spare, free = allowance, self._tokens < self._free_tokens
        for hope, index in hopes:
            loss = self._loss_of(index)
            if -hope <= best.rate:
                return None
            if free or (loss <= spare and self._lost + loss <= allowance):
                return index
            if loss <= _OUT_OF_REACH * allowance:
                # The others must not use up what this one is being saved for.
                spare = _SPARE * allowance
        return None

    def _allowance(self) -> float:
        """Return how many seconds probes may have lost by now."""
        ahead = self.arms[self._best].rate > _AHEAD * self.arms[self._plain].rate
        return (self._budget_ahead if ahead else self._budget) * self._elapsed

    def _loss_of(self, index: int) -> float:
        """Return how many seconds a probe is expected to lose against the best arm."""
        arm, best = self.arms[index], self.arms[self._best]
        if not arm.rounds:
            return _PROBE_ROUNDS * best.mean_seconds
        # A round's seconds less those in which the best arm would yield its tokens.
        a_round = arm.mean_seconds - arm.tokens / arm.rounds / best.rate if best.rate else 0.0
        return max(0.0, _PROBE_ROUNDS * a_round) + (arm.catch_up or 0.0) * arm.behind
