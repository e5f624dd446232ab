"""Decisions of planners along recorded clocks: arms of `auto`, lengths and sizes of drafts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from support.simulated_machine import draft_cost, end_chain

from golden.record import check
from specrun.runtime.drafters.combinators import ArmChooser, ArmForecast
from specrun.runtime.planning import TYPICAL_CPU, TYPICAL_GPU, CostCurve, DraftPlan

STEEP = CostCurve.flat([1.0, 1.45, 1.9, 2.3, 3.0])
CURVES = {"CPU": TYPICAL_CPU, "GPU": TYPICAL_GPU, "steep": STEEP}
# Drafting seconds a token in plain rounds, acceptance, most tokens, share of rounds that draft.
ARMS: dict[str, list[tuple[float, float, int, float]]] = {
    "nothing pays": [(0.1, 0.1, 5, 1.0), (0.05, 0.05, 4, 1.0), (0.0, 0.02, 15, 0.3)],
    "a model pays": [(0.05, 0.85, 5, 1.0), (0.05, 0.6, 2, 1.0), (0.0, 0.3, 3, 0.2)],
    "text pays": [(0.05, 0.5, 5, 1.0), (0.0, 0.9, 5, 0.8)],
    "slow and right": [(0.2, 0.9, 5, 1.0)],
}


def run(arms: list[tuple[float, float, int, float]], curve: CostCurve, seed: int) -> dict[str, Any]:
    """Decode 400 tokens on a clock of its own; return seconds and rounds of each arm."""
    generator = np.random.default_rng(seed)
    forecasts = [ArmForecast(most=max(1, n), draft=cost, curve=curve) for cost, _, n, _ in arms]
    chooser = ArmChooser([*forecasts, ArmForecast(curve=curve)], len(arms))
    chooser.begin(0)
    position, seconds, rounds = 0, 0.0, [0] * (len(arms) + 1)
    while position < 400:
        index, depth = chooser.choose()
        cost, alpha, n, active = arms[index] if index < len(arms) else (0.0, 0.0, 0, 0.0)
        drafted = min(n, depth or n) if generator.random() < active else 0
        tokens = 1
        while tokens <= drafted and generator.random() < alpha:
            tokens += 1
        spent = curve.seconds(1 + drafted) / curve.seconds(1) + drafted * cost
        spent *= float(np.exp(0.05 * generator.standard_normal()))
        chooser.record(index, tokens, spent, drafted)
        position, seconds, rounds[index] = position + tokens, seconds + spent, rounds[index] + 1
    return {"seconds": round(seconds, 6), "rounds": rounds}


def test_arms_of_auto() -> None:
    found = {
        f"{name}, {curve}, {seed}": run(arms, CURVES[curve], seed)
        for name, arms in ARMS.items()
        for curve in CURVES
        for seed in range(3)
    }
    check("auto", found)


def test_lengths_and_sizes() -> None:
    found = {}
    for name, curve in CURVES.items():
        for alpha in (0.1, 0.5, 0.9):
            source, lengths = random.Random(f"{name}{alpha}"), []
            length = DraftPlan(curve.seconds, draft_cost(0.05 * curve.seconds(1)), 8)
            for _ in range(200):
                length.start(points=True)
                drafted = 0
                while length.goes_on():
                    certainty = min(0.999, max(0.001, source.gauss(alpha, 0.2)))
                    if not length.takes(certainty):
                        break
                    drafted += 1
                accepted = 0
                while accepted < drafted and source.random() < alpha:
                    accepted += 1
                end_chain(length, drafted, accepted)
                lengths.append(drafted)
            found[f"{name}, {alpha}"] = "".join(map(str, lengths))
    check("lengths", found)
