"""The bandit behind `auto`, against simulated arms with noise, stalls, catching up, and texts that
change.

A round costs `cost` times a plain one where the arm drafts, and keeps a geometric number of tokens.
Means over 16 seeded runs are compared with fixed arms; runs are deterministic, so the bounds below
either hold or do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from specrun.runtime.drafters.combinators import ArmChooser

FREE = 64
SEEDS = range(16)
At = Callable[[int], float]


@dataclass(frozen=True)
class SimulatedArm:
    """Drafts `n` tokens, each kept with probability `alpha`, in the share `active` of its
    rounds."""

    cost: float = 1.0
    alpha: float | At = 0.0
    n: int = 0
    active: float | At = 1.0
    catch_up: float = 0.0

    def round(self, generator: np.random.Generator, position: int) -> tuple[int, float, bool]:
        alpha, active = (
            law(position) if callable(law) else law for law in (self.alpha, self.active)
        )
        drafted = self.n > 0 and generator.random() < active
        tokens = 1
        while drafted and tokens <= self.n and generator.random() < alpha:
            tokens += 1
        seconds = (self.cost if drafted else 1.0) * float(
            np.exp(0.05 * generator.standard_normal())
        )
        if generator.random() < 0.005:  # something else takes the machine
            seconds *= 5
        return tokens, seconds, drafted


PLAIN = SimulatedArm()


def seconds_a_token(
    arms: Sequence[SimulatedArm], length: int, seed: int, fixed: int | None = None
) -> float:
    """Return the time of a token after the first 64."""
    generator = np.random.default_rng([seed, 0 if fixed is None else 1 + fixed])
    chooser = ArmChooser(len(arms), len(arms) - 1)
    position, total, begun = 0, 0.0, None
    asleep = [0] * len(arms)
    while position < length:
        index = chooser.choose() if fixed is None else fixed
        tokens, seconds, drafted = arms[index].round(generator, position)
        seconds += arms[index].catch_up * asleep[index]
        asleep = [0 if number == index else asleep[number] + tokens for number in range(len(arms))]
        chooser.record(index, tokens, seconds, drafted)
        position, total = position + tokens, total + seconds
        if begun is None and position >= FREE:
            begun = position, total
    assert begun is not None
    return (total - begun[1]) / (position - begun[0])


def mean_speed(arms: Sequence[SimulatedArm], length: int, fixed: int | None = None) -> float:
    return 1.0 / float(np.mean([seconds_a_token(arms, length, seed, fixed) for seed in SEEDS]))


NEVER_PAYS = {
    "far from it": [
        SimulatedArm(2.5, 0.2, 5, 1, 0.02),
        SimulatedArm(1.5, 0.1, 2),
        SimulatedArm(1.3, 0.02, 3, 0.5),
    ],
    "nearly": [SimulatedArm(1.5, 0.3, 3, 1, 0.01), SimulatedArm(1.12, 0.05, 1)],
    "one that never drafts": [SimulatedArm(1.3, 0.1, 5, 0.0), SimulatedArm(1.8, 0.2, 5, 1, 0.01)],
    "one that costs ten times as much": [SimulatedArm(10.0, 0.5, 5, 1, 0.1)],
}
PAYS = {
    "a lot": [
        SimulatedArm(1.8, 0.85, 5, 1, 0.01),
        SimulatedArm(1.25, 0.6, 2, 1, 0.01),
        SimulatedArm(1.3, 0.3, 3, 0.2),
    ],
    "some": [
        SimulatedArm(1.8, 0.55, 5, 1, 0.01),
        SimulatedArm(1.25, 0.5, 2, 1, 0.01),
        SimulatedArm(1.3, 0.1, 3, 0.2),
    ],
    "a little": [SimulatedArm(1.6, 0.42, 4, 1, 0.01)],
    "quoting": [SimulatedArm(1.8, 0.4, 5, 1, 0.01), SimulatedArm(1.3, 0.9, 5, 0.8)],
    "one drafter": [SimulatedArm(1.6, 0.6, 4, 1, 0.01)],
}


@pytest.mark.parametrize("length", [400, 1000])
@pytest.mark.parametrize("name", NEVER_PAYS)
def test_where_nothing_pays_it_is_at_most_3_percent_slower_than_plain(
    name: str, length: int
) -> None:
    arms = [*NEVER_PAYS[name], PLAIN]
    assert mean_speed(arms, length) > 0.97 * mean_speed(arms, length, fixed=len(arms) - 1)


@pytest.mark.parametrize(("length", "share"), [(400, 0.93), (1000, 0.95)])
@pytest.mark.parametrize("name", PAYS)
def test_where_drafting_pays_it_gets_95_percent_of_the_best(
    name: str, length: int, share: float
) -> None:
    """In short texts a little less: telling arms apart that are 10 % from each other takes a
    hundred rounds."""
    arms = [*PAYS[name], PLAIN]
    best = max(mean_speed(arms, length, fixed=number) for number in range(len(arms)))
    assert mean_speed(arms, length) > share * best


def test_of_equally_fast_arms_the_simplest_is_used() -> None:
    """A cascade over the draft model that gains 1 % is not worth being a cascade; one that gains 20
    % is."""
    for gain, used in ((1.01, 1), (1.2, 0)):
        chooser = ArmChooser(3, 2, sizes=[4, 2, 1])
        chosen = []
        for _ in range(600):
            index = chooser.choose()
            chooser.record(index, 2, (1.0 / gain, 1.0, 1.9)[index], index < 2)
            chosen.append(index)
        assert chosen[300:].count(used) > 250


def test_the_first_arm_is_the_first_to_be_used() -> None:
    chooser = ArmChooser(3, 2)
    assert chooser.is_new
    assert [_round(chooser) for _ in range(2)] == [0, 0]
    assert not chooser.is_new
    other = ArmChooser(3, 2)
    other.start_with(1)
    assert [_round(other) for _ in range(2)] == [1, 1]


def _round(chooser: ArmChooser) -> int:
    index = chooser.choose()
    chooser.record(index, 1, 1.0, index < 2)
    return index


def test_a_text_that_begins_to_quote_is_noticed() -> None:
    """The best fixed arm knows the future; 90 % of it is reached although lookup is useless for
    half the text."""
    quoting = SimulatedArm(1.3, 0.9, 5, lambda position: 0.9 if position > 500 else 0.0)
    arms = [SimulatedArm(1.8, 0.5, 5, 1, 0.01), quoting, PLAIN]
    best = max(mean_speed(arms, 1000, fixed=number) for number in range(3))
    assert mean_speed(arms, 1000) > 0.9 * best


def test_a_drafter_that_fails_later_is_left() -> None:
    """It pays for 300 tokens, and would cost twice the time for 900 more: auto beats both fixed
    arms."""
    fading = SimulatedArm(1.8, lambda position: 0.9 if position < 300 else 0.0, 5, 1, 0.01)
    arms = [fading, PLAIN]
    assert mean_speed(arms, 1200) > max(mean_speed(arms, 1200, fixed=number) for number in range(2))


class _ProbesAtWill(ArmChooser):
    """Wrong: looks around in every tenth round, whatever that has cost so far."""

    def choose(self) -> int:
        best = super().choose()
        return self._now // 10 % len(self.arms) if self._now % 10 == 0 else best


def test_without_the_account_the_bound_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [*NEVER_PAYS["far from it"], PLAIN]
    plain = mean_speed(arms, 1000, fixed=3)
    monkeypatch.setitem(globals(), "ArmChooser", _ProbesAtWill)
    assert mean_speed(arms, 1000) < 0.97 * plain


def test_probes_of_a_hopeless_arm_become_rare() -> None:
    arms, chooser = [SimulatedArm(2.0, 0.05, 5), PLAIN], ArmChooser(2, 1)
    generator, probes = np.random.default_rng(0), []
    for position in range(4000):
        index = chooser.choose()
        tokens, seconds, drafted = arms[index].round(generator, position)
        chooser.record(index, tokens, seconds, drafted)
        if index == 0:
            probes.append(position)
    assert sum(probe < 1000 for probe in probes) > 3
    assert sum(probe >= 3000 for probe in probes) < 20


def test_every_arm_is_tried_early_and_the_first_round_of_a_run_does_not_count_as_its_speed() -> (
    None
):
    """Reading a long prompt is no sign of a slow drafter."""
    arms, chooser = [SimulatedArm(1.5, 0.9, 5), PLAIN], ArmChooser(2, 1)
    chooser.begin(2000)
    generator, seen = np.random.default_rng(1), list[int]()
    for position in range(40):
        index = chooser.choose()
        tokens, seconds, drafted = arms[index].round(generator, position)
        if index == 0 and 0 not in seen:
            seconds += 50.0
        seen.append(index)
        chooser.record(index, tokens, seconds, drafted)
    assert set(seen[:10]) == {0, 1}
    assert seen[-10:].count(0) >= 8
    assert chooser.arms[0].catch_up == pytest.approx(50 / 2000, rel=0.1)


def test_clocks_that_stand_still_are_survived() -> None:
    """Each arm is as quick as can be: all are tried, and their rates are numbers that others can be
    compared with."""
    chooser, chosen = ArmChooser(3, 2), list[int]()
    for _ in range(100):
        chosen.append(chooser.choose())
        chooser.record(chosen[-1], 1, 0.0, True)
    assert set(chosen) == {0, 1, 2}
    assert [arm.rate for arm in chooser.arms] == pytest.approx([1e9] * 3)
