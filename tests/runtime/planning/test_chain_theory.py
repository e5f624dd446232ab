"""The formulas applied to a tuned setting: on a machine where width is free they are the paper's
own."""

from __future__ import annotations

from specrun.runtime.planning import CostCurve, RoundCosts, chain_theory


def test_width_that_costs_shortens_the_draft() -> None:
    rising = RoundCosts(
        CostCurve.flat([1.0 + 0.3 * n for n in range(20)]), CostCurve.flat([0.1] * 20)
    )
    theory = chain_theory(0.8, rising, 0.05)
    assert 0 < theory.length < theory.flat_length
    assert 1.0 < theory.improvement < theory.flat_improvement
