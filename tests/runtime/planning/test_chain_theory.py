"""The formulas applied to a tuned setting: on a machine where width is free they are the paper's
own."""

from __future__ import annotations

import pytest

from specrun.runtime.planning import CostCurve, RoundCosts, chain_theory


def test_where_width_is_free_both_improvements_are_theorem_3_8() -> None:
    costs = RoundCosts(CostCurve.flat([1.0] * 20), CostCurve.flat([0.1] * 20))
    theory = chain_theory(0.8, costs, 0.05)
    assert theory.cost_ratio == pytest.approx(0.1)
    lengths = [(1 - 0.8 ** (g + 1)) / (0.2 * (0.1 * g + 1)) for g in range(17)]
    best = max(range(17), key=lengths.__getitem__)
    assert theory.flat_length == theory.length == best
    assert theory.flat_improvement == pytest.approx(lengths[best])
    assert theory.improvement == pytest.approx(lengths[best])
    assert theory.expected_tokens == pytest.approx((1 - 0.8 ** (best + 1)) / 0.2)
    assert theory.operations == pytest.approx((0.05 * best + best + 1) / theory.expected_tokens)


def test_width_that_costs_shortens_the_draft() -> None:
    rising = RoundCosts(
        CostCurve.flat([1.0 + 0.3 * n for n in range(20)]), CostCurve.flat([0.1] * 20)
    )
    theory = chain_theory(0.8, rising, 0.05)
    assert 0 < theory.length < theory.flat_length
    assert 1.0 < theory.improvement < theory.flat_improvement


def test_no_drafting_where_it_does_not_pay() -> None:
    dear = RoundCosts(CostCurve.flat([float(n + 1) for n in range(20)]), CostCurve.flat([0.5] * 20))
    theory = chain_theory(0.3, dear, 0.5)
    assert (theory.length, theory.improvement) == (0, pytest.approx(1.0))
