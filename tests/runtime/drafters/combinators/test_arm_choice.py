"""The bandit behind `auto`, on a virtual clock: arms with noise and reading, texts that change.

Seconds are plain rounds: a round that drafts d tokens takes what the typical curve of a CPU says
for 1 + d tokens and `draft` for each of them, times noise; tokens are kept one after the other with
probability `alpha`. Runs are seeded, so the bounds below either hold or do not: nothing is left to
chance when the tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest

from specrun.runtime.drafters.combinators import Arm, ArmChooser, ArmForecast, bandit
from specrun.runtime.planning import (
    SHARE,
    SHARES_OF_AUTO,
    START,
    TYPICAL_CPU,
    TYPICAL_GPU,
    CostCurve,
)

SEEDS = range(8)
At = Callable[[int], float]


@dataclass(frozen=True)
class SimulatedArm:
    """Drafts at most `n` tokens in the share `active` of its rounds; costs `wrong` times as much as
    its sizes say."""

    draft: float = 0.0
    alpha: float | At = 0.0
    n: int = 0
    active: float = 1.0
    wrong: float = 1.0
    curve: CostCurve = TYPICAL_CPU

    @property
    def forecast(self) -> ArmForecast:
        return ArmForecast(most=max(1, self.n), draft=self.draft / self.wrong, curve=self.curve)

    @property
    def reading(self) -> float:
        return self.draft * self.forecast.target_reading

    def round(
        self, generator: np.random.Generator, position: int, depth: int, noise: float
    ) -> tuple[int, float, int]:
        """Return the round's tokens, seconds and drafted nodes."""
        alpha = self.alpha(position) if callable(self.alpha) else self.alpha
        drafted = min(self.n, depth or self.n) if generator.random() < self.active else 0
        tokens = 1
        while tokens <= drafted and generator.random() < alpha:
            tokens += 1
        seconds = self.curve.seconds(1 + drafted) / self.curve.seconds(1) + drafted * self.draft
        return tokens, seconds * float(np.exp(noise * generator.standard_normal())), drafted


class Policy(Protocol):
    def choose(self) -> tuple[int, int]: ...
    def record(self, index: int, tokens: int, seconds: float, drafted: int) -> None: ...


class TriesAllInFull:
    """Wrong, but what one would write first: four rounds of every arm, then the best for good."""

    def __init__(self, n_arms: int) -> None:
        self._sums, self._rounds = [[0.0, 0.0] for _ in range(n_arms)], 0

    def choose(self) -> tuple[int, int]:
        if self._rounds < 4 * len(self._sums):
            return self._rounds // 4, 0
        return max(range(len(self._sums)), key=lambda i: self._sums[i][0] / self._sums[i][1]), 0

    def record(self, index: int, tokens: int, seconds: float, drafted: int) -> None:
        self._rounds += 1
        self._sums[index][0] += tokens
        self._sums[index][1] += seconds


class Always:
    def __init__(self, index: int) -> None:
        self._index = index

    def choose(self) -> tuple[int, int]:
        return self._index, 0

    def record(self, index: int, tokens: int, seconds: float, drafted: int) -> None: ...


@dataclass(frozen=True)
class Setting:
    """Arms, of which plain decoding is the last, tokens of a prompt, and noise."""

    arms: Sequence[SimulatedArm]
    prompt: int = 0
    noise: float = 0.05

    def chooser(self) -> ArmChooser:
        chooser = ArmChooser([arm.forecast for arm in self.arms], len(self.arms) - 1)
        chooser.begin(self.prompt)
        return chooser

    def run(
        self, length: int, seed: int, policy: Policy | None = None
    ) -> list[tuple[int, float, int, int]]:
        """Return position, time, arm and depth after each round."""
        generator, policy = np.random.default_rng(seed), policy or self.chooser()
        position, now, history = 0, 0.0, []
        asleep = [self.prompt] * len(self.arms)
        while position < length:
            index, depth = policy.choose()
            arm = self.arms[index]
            tokens, seconds, drafted = arm.round(generator, position, depth, self.noise)
            seconds += arm.reading * asleep[index]
            asleep = [0 if number == index else gap + tokens for number, gap in enumerate(asleep)]
            policy.record(index, tokens, seconds, drafted)
            position, now = position + tokens, now + seconds
            history.append((position, now, index, depth))
        return history

    def speed(self, start: int, end: int, policy: Callable[[], Policy | None]) -> float:
        """Return tokens a second from token `start` to `end`, the mean over seeds."""
        times = []
        for seed in SEEDS:
            history = [(0, 0.0, 0, 0), *self.run(end, seed, policy())]
            begun = next(entry for entry in history if entry[0] >= start)
            times.append((history[-1][1] - begun[1]) / (history[-1][0] - begun[0]))
        return 1.0 / float(np.mean(times))

    def against(
        self, start: int, end: int, fixed: int, policy: type[TriesAllInFull] | None
    ) -> float:
        """Return the speed as a share of that of a fixed arm."""
        own = self.speed(start, end, lambda: policy and policy(len(self.arms)))
        return own / self.speed(start, end, lambda: Always(fixed))


PLAIN = SimulatedArm()
NEVER_PAYS = {
    "far from it": Setting(
        [
            SimulatedArm(0.1, 0.1, 5),
            SimulatedArm(0.05, 0.05, 4),
            SimulatedArm(0, 0.02, 15, 0.3),
            PLAIN,
        ]
    ),
    "nearly": Setting([SimulatedArm(0.1, 0.4, 3), SimulatedArm(0.02, 0.2, 1), PLAIN]),
    "after a prompt": Setting([SimulatedArm(0.1, 0.05, 5), PLAIN], prompt=50),
    "one that never drafts": Setting(
        [SimulatedArm(0, 0, 5, 0.0), SimulatedArm(0.1, 0.2, 5), PLAIN]
    ),
    "25 times slower than the target": Setting([SimulatedArm(25, 0.9, 5), PLAIN], prompt=50),
    "times vary by a fifth": Setting(
        [SimulatedArm(0.1, 0.1, 5), SimulatedArm(0.05, 0.05, 4), PLAIN], noise=0.2
    ),
}


@pytest.mark.parametrize("name", NEVER_PAYS)
def test_where_nothing_pays_the_first_30_tokens_have_90_percent_of_plain_and_later_ones_95(
    name: str,
) -> None:
    setting = NEVER_PAYS[name]
    plain = len(setting.arms) - 1
    assert setting.against(0, 30, plain, None) > 0.9
    assert setting.against(30, 400, plain, None) > 0.95


@pytest.mark.parametrize("name", ["far from it", "25 times slower than the target"])
def test_a_policy_that_tries_all_in_full_fails_there(name: str) -> None:
    setting = NEVER_PAYS[name]
    assert setting.against(0, 30, len(setting.arms) - 1, TriesAllInFull) < 0.75


PAYS = {
    "a lot": (
        [SimulatedArm(0.05, 0.85, 5), SimulatedArm(0.05, 0.6, 2), SimulatedArm(0, 0.3, 3, 0.2)],
        0,
    ),
    "some": ([SimulatedArm(0.05, 0.65, 5), SimulatedArm(0.02, 0.5, 2)], 0),
    "one of medium size": ([SimulatedArm(0.1, 0.8, 5)], 0),
    "slow, but nearly always right": ([SimulatedArm(0.2, 0.9, 5)], 0),
    "quoting": ([SimulatedArm(0.05, 0.5, 5), SimulatedArm(0, 0.9, 5, 0.8)], 1),
}


@pytest.mark.parametrize("name", PAYS)
def test_where_drafting_pays_it_gets_80_percent_of_the_best_in_200_tokens_and_90_later(
    name: str,
) -> None:
    arms, best = PAYS[name]
    setting = Setting([*arms, PLAIN])
    assert setting.against(0, 200, best, None) > 0.8
    assert setting.against(200, 1000, best, None) > 0.9


def _late(cost: float, good: float, noise: float = 0.05) -> Setting:
    """Return arms of which number 1 becomes good at token 2,000."""
    becomes = SimulatedArm(cost, lambda position: good if position >= 2000 else 0.05, 5)
    return Setting([SimulatedArm(0.0, 0.1, 5, 0.3), becomes, PLAIN], noise=noise)


@pytest.mark.parametrize("setting", [_late(0.05, 0.85), _late(0.1, 0.8), _late(0.05, 0.8, 0.2)])
def test_a_drafter_that_becomes_good_at_token_2000_is_used_within_500(setting: Setting) -> None:
    """Used: most of the tokens from there on are its own, in every run."""
    for seed in SEEDS:
        history = setting.run(2700, seed)
        last = [index for position, _, index, _ in history if position > 2500]
        assert last.count(1) > 0.7 * len(last)
        before = [index for position, _, index, _ in history if 30 < position <= 2000]
        assert before.count(1) < 0.05 * len(before)
    forgetful = setting.run(2700, 0, TriesAllInFull(3))
    assert all(index == 2 for position, _, index, _ in forgetful if position > 100)


def test_a_drafter_that_fails_later_is_left_within_some_rounds() -> None:
    """It pays for 1,000 tokens; what comes after takes at most 20 plain rounds and 5 % more than
    plain decoding."""
    fading = SimulatedArm(0.1, lambda position: 0.85 if position < 1000 else 0.05, 5)
    setting = Setting([fading, PLAIN])
    for seed in SEEDS:
        history = setting.run(2000, seed)
        at = next(entry for entry in history if entry[0] >= 1000)
        assert history[-1][1] - at[1] < 1.05 * (history[-1][0] - at[0]) + 20.0


def _alarms(monkeypatch: pytest.MonkeyPatch, lost: float) -> int:
    """Return how often an arm that stays as it is was believed to have changed, in 24 runs.

    `lost` is how many plain rounds it may lose before.
    """
    counted = []
    inner = Arm.notices_change

    def counting(arm: Arm, plain: float) -> bool:
        changed = inner(arm, plain)
        counted.append(changed)
        return changed

    monkeypatch.setattr(bandit, "_CHANGED", lost)
    monkeypatch.setattr(Arm, "notices_change", counting)
    setting = Setting([SimulatedArm(0.02, 0.62, 3), SimulatedArm(0.0, 0.3, 3, 0.3), PLAIN])
    for seed in range(24):
        setting.run(1000, seed)
    return sum(counted)


def test_a_run_of_bad_luck_is_not_taken_for_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """By chance, 24,000 tokens of a drafter that pays have stretches that lose several plain
    rounds; those that lose ten are rare. Control: a bound of four is passed by chance."""
    assert _alarms(monkeypatch, bandit._CHANGED) <= 2
    monkeypatch.undo()
    assert _alarms(monkeypatch, 4.0) > 12


def test_what_an_arm_lost_adds_up_until_it_is_won_back() -> None:
    arm = Arm()

    def changed(tokens: int, seconds: float) -> bool:
        arm.add(tokens, seconds, drafted=True)
        return arm.notices_change(1.0)

    losing = [changed(1, 3.0) for _ in range(4)]
    assert not any(losing)
    assert arm.slump == pytest.approx(8.0)
    assert not changed(9, 1.0)  # all of it is won back: what was before is forgotten
    assert arm.slump == 0.0
    assert [changed(1, 3.0) for _ in range(6)] == [*[False] * 5, True]
    assert arm.rounds < 6.1  # the last six alone are believed, which say a third of plain
    assert arm.rate == pytest.approx(1 / 3)


@pytest.mark.parametrize("curve", [TYPICAL_CPU, TYPICAL_GPU], ids=["cpu", "gpu"])
def test_the_account_holds_whatever_drafters_do(curve: CostCurve) -> None:
    """Arms as mean as can be: good as long as they are probed, bad once they are in use. Costs are
    as forecast, those of reading too, so the bound that the module states holds at each token."""
    for seed in range(16):
        generator = np.random.default_rng(seed)
        forecasts = [
            ArmForecast(most=int(generator.integers(1, 16)), draft=cost, curve=curve)
            for cost in (0.02, 0.1, 0.3, 0.0)
        ]
        chooser = ArmChooser([*forecasts, ArmForecast(curve=curve)], 4)
        chooser.begin(0)
        elapsed, tokens, good, asleep = 0.0, 0, [0] * 5, [0] * 5
        for _ in range(600):
            index, depth = chooser.choose()
            drafted = 0 if index == 4 else min(depth or 99, forecasts[index].most)
            good[index] += 1
            fails = good[index] % 40 > int(generator.integers(2, 30))
            new = 1 if fails else 1 + int(generator.integers(0, drafted + 1))
            seconds = 1.0
            if drafted:
                arm = forecasts[index]
                seconds += arm.extra(drafted) + arm.draft * arm.target_reading * asleep[index]
            asleep = [0 if arm == index else gap + new for arm, gap in enumerate(asleep)]
            chooser.record(index, new, seconds, drafted)
            elapsed, tokens = elapsed + seconds, tokens + new
            assert elapsed <= (1.0 + SHARES_OF_AUTO * SHARE) * tokens + START + 1e-9


def test_a_drafter_that_is_slower_than_its_size_is_given_up_after_one_round() -> None:
    """What no forecast said is lost once; the account then allows no second round for long."""
    setting = Setting([SimulatedArm(25, 0.9, 5, wrong=25 * 20), PLAIN])
    history = setting.run(400, 0)
    assert [index for _, _, index, _ in history].count(0) == 1
    assert next(entry for entry in history if entry[2] == 0)[3] == 1  # the shortest draft there is


class ColdStart:
    """Passes a chooser's rounds on; the first that drafts takes three plain rounds more."""

    def __init__(self, chooser: ArmChooser) -> None:
        self.choose, self._chooser, self._is_cold = chooser.choose, chooser, True

    def record(self, index: int, tokens: int, seconds: float, drafted: int) -> None:
        if drafted and self._is_cold:
            seconds, self._is_cold = seconds + 3.0, False
        self._chooser.record(index, tokens, seconds, drafted)


def test_a_cold_start_is_no_sign_of_a_slow_drafter() -> None:
    """A good drafter is in use within 150 tokens all the same."""
    setting = Setting([SimulatedArm(0.05, 0.85, 5), PLAIN], prompt=32)
    for seed in SEEDS:
        history = setting.run(300, seed, ColdStart(setting.chooser()))
        used = [index for position, _, index, _ in history if position > 150]
        assert used.count(0) > 0.7 * len(used)


def test_what_an_earlier_text_showed_is_used_at_once() -> None:
    setting = Setting([SimulatedArm(0.1, 0.85, 5), PLAIN])
    first = setting.chooser()
    setting.run(400, 0, first)
    known = ArmChooser([arm.forecast for arm in setting.arms], 1, known=first.arms)
    known.begin(0)
    assert known.choose() == (0, 0)
    assert setting.chooser().choose() == (1, 0)


def test_of_equally_fast_arms_the_simplest_is_used() -> None:
    """A cascade over the draft model that gains 1 % is not worth being a cascade; one that gains 20
    % is."""
    for gain, used in ((1.01, 1), (1.2, 0)):
        chooser = ArmChooser([ArmForecast(parts=4), ArmForecast(parts=2), ArmForecast()], 2)
        chosen = []
        for _ in range(600):
            index, _ = chooser.choose()
            chooser.record(index, 2, (1.0 / gain, 1.0, 1.9)[index], 0 if index == 2 else 5)
            chosen.append(index)
        assert chosen[300:].count(used) > 230


def test_the_first_round_of_a_run_does_not_count_as_its_speed() -> None:
    """Reading a long prompt is no sign of a slow drafter."""
    setting = Setting([SimulatedArm(0.1, 0.9, 5), PLAIN], prompt=2000)
    chooser = setting.chooser()
    history = setting.run(400, 1, chooser)
    assert [index for _, _, index, _ in history][-20:].count(0) >= 18
    assert chooser.arms[0].rate > 1.3


def test_what_catching_up_costs_is_measured_when_an_arm_comes_back() -> None:
    setting = Setting([SimulatedArm(0.1, 0.2, 5, wrong=2.0), PLAIN], noise=0.0)
    chooser = setting.chooser()
    setting.run(600, 1, chooser)
    assert chooser.arms[0].catch_up == pytest.approx(setting.arms[0].reading, rel=0.1)


def test_clocks_that_stand_still_are_survived() -> None:
    """Each arm is as quick as can be: all are tried, and their rates are numbers that others can be
    compared with."""
    chooser, chosen = ArmChooser([ArmForecast()] * 3, 2), list[int]()
    for _ in range(100):
        index, _ = chooser.choose()
        chooser.record(index, 1, 0.0, 0)
        chosen.append(index)
    assert set(chosen) == {0, 1, 2}
    assert [arm.rate for arm in chooser.arms] == pytest.approx([1e9] * 3)


FREE = CostCurve.flat([1.0] * 17)
"""What a GPU might take: any batch as long as a token."""


def tried(forecasts: Sequence[ArmForecast], rounds: int, share: float) -> list[int]:
    """Return the arms of these rounds, in which this share of each draft is accepted."""
    plain = len(forecasts)
    chooser, chosen = ArmChooser([*forecasts, ArmForecast(curve=FREE)], plain), list[int]()
    for _ in range(rounds):
        index, depth = chooser.choose()
        most, draft = (
            (0, 0.0) if index == plain else (forecasts[index].most, forecasts[index].draft)
        )
        drafted = min(depth or most, most)
        chooser.record(index, 1 + int(share * drafted), 1.0 + draft * drafted, drafted)
        chosen.append(index)
    return chosen


def test_an_arm_that_cannot_be_the_best_waits_for_long() -> None:
    """A chain of one token yields two at most, where another yields nine in a round."""
    short, long = ArmForecast(most=1, curve=FREE), ArmForecast(most=8, curve=FREE)
    assert (short.ceiling(1.0), long.ceiling(1.0)) == pytest.approx((2.0, 9.0))
    chosen = tried([long, short], 200, 1.0)
    assert 1 not in chosen[:50]
    assert 1 in chosen  # costs may have been judged wrongly: it is looked at in the end


def test_of_the_unknown_the_one_that_costs_least_comes_first() -> None:
    dear, cheap = (ArmForecast(most=8, draft=draft, curve=FREE) for draft in (0.02, 0.0))
    chosen = tried([dear, cheap], 200, 0.5)
    assert chosen[:3] == [2, 2, 1]
    assert 0 in chosen  # which may be better, as far as is known


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_that_wait_to_be_counted_are_counted_once_and_for_their_arm(seed: int) -> None:
    arms = [SimulatedArm(), SimulatedArm(alpha=0.9, n=4, active=0.1)]
    generator = np.random.default_rng(seed)
    chooser, unseen, plain = ArmChooser([arm.forecast for arm in arms], 0), [0, 0], 0
    for position in range(300):
        index, depth = chooser.choose()
        tokens, seconds, drafted = arms[index].round(generator, position, depth, 0.05)
        chooser.record(index, tokens, seconds, drafted)
        unseen = [0 if number == index else n + tokens for number, n in enumerate(unseen)]
        plain += index == 0
        if position % 7 == 0:  # to ask is to count what waits
            assert [arm.behind for arm in chooser.arms] == unseen
    assert plain > 7  # plain rounds wait


def test_a_drafter_that_takes_time_to_draft_nothing_is_noticed() -> None:
    """A model that is asked and says nothing takes longer than plain decoding: each such round is
    booked at once, and a drafter that was good until then is left within sixteen."""
    forecast = ArmForecast(most=4, draft=0.1, curve=FREE)
    chooser = ArmChooser([forecast, ArmForecast(curve=FREE)], 1)
    silent = []
    for number in range(150):
        index, depth = chooser.choose()
        if index == 1:
            chooser.record(1, 1, 1.0, 0)
        elif number < 60:
            drafted = depth or 4
            chooser.record(0, 1 + drafted, 1.0 + 0.1 * drafted, drafted)
        else:
            chooser.record(0, 1, 1.9, 0)
        silent.append(index == 0 and number >= 60)
    assert silent[60:70].count(True) > 0
    assert silent[60:].count(True) <= 16
