"""Rows of the theory of chains: by their formulas, the best lengths, and numbers that make no
sense."""

from __future__ import annotations

import dataclasses

import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime.planning import (
    BestLengths,
    ChainInputs,
    CostCurve,
    MemoryTraffic,
    best_lengths,
    chain_row,
    tokens_per_second_by_bandwidth,
)

CURVE = CostCurve((1, 2, 4), (1.0, 1.5, 2.0), (1.0, 1.5, 2.0))
TRAFFIC = (MemoryTraffic(1000.0, 2.0), MemoryTraffic(100.0, 0.0))
INPUTS = ChainInputs(0.5, 0.1, 0.2, CURVE, TRAFFIC, 50.0)


def test_a_row_says_what_the_formulas_say() -> None:
    """Worked out by hand for alpha = 1/2, n = 2: 1 + 1/2 + 1/4 tokens a round."""
    row = chain_row(INPUTS, 2)
    assert row.tokens == pytest.approx(1.75)
    assert row.improvement == pytest.approx(1.75 / 1.2)
    assert row.operations == pytest.approx((2 * 0.2 + 3) / 1.75)
    assert row.measured == pytest.approx(1.75 / (1.75 + 0.2))  # T(3) lies between T(2) and T(4)
    assert row.bytes == pytest.approx((1100 + 200) / 1.75 / 1100)


def test_what_is_not_known_is_left_out() -> None:
    row = chain_row(ChainInputs(0.5, 0.1, 0.2), 2)
    assert row.measured is None
    assert row.bytes is None
    assert best_lengths(ChainInputs(0.5, 0.1, 0.2)) == BestLengths(2, None, None)


def test_the_best_lengths_are_those_of_most_gain() -> None:
    """A drafter for nothing is drafted with for ever, unless evaluations grow; one that costs more
    than it is accepted never."""
    free = dataclasses.replace(INPUTS, acceptance=0.9, cost_ratio=0.0)
    best = best_lengths(free, 20)
    assert best.flat == 20
    assert best.measured is not None
    assert best.measured < 20
    assert best_lengths(dataclasses.replace(INPUTS, cost_ratio=0.6)).flat == 0
    lengths = best_lengths(INPUTS)
    for name, value in (("improvement", lengths.flat), ("measured", lengths.measured)):
        assert value is not None
        gains = [getattr(chain_row(INPUTS, n), name) for n in range(30)]
        assert gains[value] == max(gains)


def test_tokens_a_second_are_bandwidth_over_bytes() -> None:
    assert tokens_per_second_by_bandwidth(INPUTS, 0, 2200.0) == pytest.approx(2.0)
    drafted = tokens_per_second_by_bandwidth(INPUTS, 2, 2200.0)
    assert drafted == pytest.approx(2200 / (1300 / 1.75))
    with pytest.raises(OptionError, match="more than 0"):
        tokens_per_second_by_bandwidth(INPUTS, 0, 0.0)
    with pytest.raises(OptionError, match="the files of both models"):
        tokens_per_second_by_bandwidth(ChainInputs(0.5, 0.1, 0.2), 0, 1.0)


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((1.5, 0.1, 0.1), "acceptance"),
        ((0.5, -0.1, 0.1), "cost_ratio"),
        ((0.5, 0.1, float("nan")), "operation_cost_ratio"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    numbers: tuple[float, float, float], name: str
) -> None:
    with pytest.raises(OptionError, match=name):
        ChainInputs(*numbers)
