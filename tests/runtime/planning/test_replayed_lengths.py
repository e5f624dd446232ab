"""Where chains end, replayed: n=auto against every given n on the same chains, priced by curves.

A place of a text has a chain that would be drafted there: how certain the drafter is of each token,
and whether it would be accepted. Nothing is timed, so the figures are the same on any machine. The
chains are made up: of a peaked pair, whose short answers are easy throughout, and of a flat one,
whose certainties come in runs and say how often tokens are accepted, as measured pairs' do. The
curves are those of a padded 400M target on one machine, at 1, 2, 3, ... tokens.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable

import pytest
from support.simulated_machine import Endless, draft_cost, end_chain

from specrun.runtime.planning import CostCurve, DraftPlan, draft_plan
from specrun.runtime.trees import ROOT

F16 = CostCurve(
    (1, 2, 3, 4, 5, 6, 7, 8, 16), *2 * ((32.3, 49.4, 49.4, 52.3, 56.6, 58.5, 67.2, 118.4, 118.4),)
)
Q8_0 = CostCurve(
    (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), *2 * ((25.6, 32, 40.7, 50.1, 62, 66, 69.9, 92, 98, 116.7),)
)
# A small target in F16, in milliseconds; its head takes 1.6 for a token.
STEEP = CostCurve((1, 2, 3, 4, 5, 6, 8, 12, 16), *2 * ((19, 27.7, 28.9, 34, 34.5, 36, 45, 52, 64),))
HEAD_STEP = 1.6
STEP, MOST = 0.3, 15
Place = tuple[list[float], list[bool]]
Stop = Callable[[list[float]], tuple[int, int]]


def peaked(seed: int) -> list[list[Place]]:
    """Answers of some 16 tokens, nearly all of which are accepted."""
    rng = random.Random(seed)

    def place() -> Place:
        return [0.9999] * MOST, [rng.random() < 0.999 for _ in range(MOST)]

    return [[place() for _ in range(rng.randrange(12, 20))] for _ in range(100)]


def flat(seed: int) -> list[list[Place]]:
    """Answers of 256 tokens; the log-odds of being accepted are .35 + .4 x of the certainty's."""
    rng = random.Random(seed)

    def place() -> Place:
        x, certainties, accepted = rng.gauss(0.5, 2.5), [], []
        for _ in range(MOST):
            x = 0.5 + 0.8 * (x - 0.5) + rng.gauss(0.0, 1.5)
            certainties.append(1.0 / (1.0 + math.exp(-x)))
            accepted.append(rng.random() < 1.0 / (1.0 + math.exp(-0.35 - 0.4 * x)))
        return certainties, accepted

    return [[place() for _ in range(256)] for _ in range(12)]


def weak(seed: int) -> list[list[Place]]:
    """Answers of 200 tokens and a drafter that is seldom right, and seldom knows when."""
    rng = random.Random(seed)

    def place() -> Place:
        x, certainties, accepted = rng.gauss(-0.3, 1.5), [], []
        for _ in range(MOST):
            x = -0.3 + 0.6 * (x + 0.3) + rng.gauss(0.0, 1.2)
            certainties.append(1.0 / (1.0 + math.exp(-x)))
            accepted.append(rng.random() < 1.0 / (1.0 + math.exp(0.8 - 0.7 * x)))
        return certainties, accepted

    return [[place() for _ in range(200)] for _ in range(12)]


PAIRS = {"peaked": peaked, "flat": flat}
CURVES = {"F16": F16, "Q8_0": Q8_0}
HELD_OUT = 7  # the seed of chains that nothing was tuned on


def speed(texts: list[list[Place]], curve: CostCurve, length: DraftPlan | int) -> float:
    """Return tokens a second, with the length of a chain given or decided."""
    tokens, seconds = 0, 0.0
    for text in texts:
        place = 0
        if isinstance(length, DraftPlan):
            length.begin()
        while place < len(text):
            certainties, accepted = text[place]
            room = min(MOST, len(text) - place - 1)
            drafted, asked = _drafted(certainties[:room], length)
            kept = sum(1 for _ in itertools.takewhile(bool, accepted[:drafted]))
            if isinstance(length, DraftPlan):
                end_chain(length, drafted, kept)
            tokens, place = tokens + kept + 1, place + kept + 1
            seconds += curve.seconds(1 + drafted) + asked * STEP
    return tokens / seconds


def _drafted(certainties: list[float], length: DraftPlan | int) -> tuple[int, int]:
    if isinstance(length, int):
        return min(length, len(certainties)), min(length, len(certainties))
    length.start(points=False)
    drafted = asked = 0
    while drafted < len(certainties) and length.goes_on():
        asked += 1
        if not length.takes(certainties[drafted]):
            break
        drafted += 1
    return drafted, asked


def speed_of_head(step: float) -> float:
    """Return the speed of a weak head over plain decoding; it computes several tokens at once."""
    length, tokens, seconds = DraftPlan(STEEP.seconds, draft_cost(step), MOST), 0, 0.0
    for text in weak(HELD_OUT):
        length.begin()
        place = 0
        while place < len(text):
            certainties, accepted = text[place]
            room = min(MOST, len(text) - place - 1)
            asked = min(length.depth_to_ask(), room)
            values = list(itertools.accumulate(certainties[:asked], operator.mul))
            drafted = len(length.best(values, range(ROOT, asked - 1), asked)) if asked else 0
            kept = sum(1 for _ in itertools.takewhile(bool, accepted[:drafted]))
            end_chain(length, drafted, kept)
            tokens, place = tokens + kept + 1, place + kept + 1
            seconds += STEEP.seconds(1 + drafted) + asked * step
    return tokens / seconds * STEEP.seconds(1)


def gain(pair: str, curve: CostCurve) -> float:
    """Return the speed of n=auto over that of the best n of 1 to 10."""
    texts = PAIRS[pair](HELD_OUT)
    auto = DraftPlan(curve.seconds, draft_cost(0.03 * curve.seconds(1)), MOST)
    return speed(texts, curve, auto) / max(speed(texts, curve, n) for n in range(1, 11))


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("pair", PAIRS)
def test_auto_is_nowhere_below_097_of_the_best_given_n(pair: str, curve: str) -> None:
    assert gain(pair, CURVES[curve]) > 0.97


def test_a_peaked_pair_drafts_past_a_step_of_the_curve_from_the_first_round() -> None:
    """Answers of 16 tokens are too short to learn much: what the chain itself shows decides."""
    assert gain("peaked", F16) > 1.05


def test_a_rule_that_takes_tokens_to_come_for_usual_ones_stops_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: the rule as it was."""
    monkeypatch.setattr(draft_plan, "_ALIKE", 0.0)
    assert gain("peaked", F16) < 1.05


def test_a_head_that_is_asked_in_vain_rests_before_it_loses_much() -> None:
    assert speed_of_head(HEAD_STEP) > 0.97


def test_a_head_that_may_lose_anything_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: asked as often as its certainty lets hope."""
    monkeypatch.setattr(draft_plan, "Account", Endless)
    assert speed_of_head(HEAD_STEP) < 0.94


def test_a_head_that_pays_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cheaper head the same drafts gain, and resting would lose that."""
    rests = speed_of_head(0.3)
    monkeypatch.setattr(draft_plan, "Account", Endless)
    assert rests > 0.99 * speed_of_head(0.3) > 1.0
