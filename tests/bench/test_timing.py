"""Medians, spreads and ratios of repeated measurements, and the order they are taken in."""

from __future__ import annotations

import pytest

from specrun.bench.timing import interleaved, ratio_of, spread_of
from specrun.bindings.errors import OptionError


def test_every_repetition_visits_every_arm_and_the_order_alternates() -> None:
    assert list(interleaved(3, 3)) == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 2), (1, 1), (1, 0)),
        *((2, 0), (2, 1), (2, 2)),
    ]
    assert list(interleaved(2, 0)) == []


def test_spread_of_known_values() -> None:
    spread = spread_of([4.0, 1.0, 3.0, 2.0, 10.0])
    assert (spread.n, spread.median, spread.mean) == (5, 3.0, 4.0)
    assert (spread.low, spread.lower_quartile, spread.upper_quartile, spread.high) == (
        1.0,
        2.0,
        4.0,
        10.0,
    )
    assert spread.sd == pytest.approx(12.5**0.5)


def test_spread_of_one_value_has_no_width() -> None:
    spread = spread_of([7.0])
    assert (spread.median, spread.sd, spread.low, spread.high) == (7.0, 0.0, 7.0, 7.0)


def test_quartiles_lie_between_values() -> None:
    assert spread_of([0.0, 1.0]).lower_quartile == 0.25


def test_ratio_is_that_of_repetitions() -> None:
    # The second repetition was slow for both: its own ratio stays 2.
    ratio = ratio_of([20.0, 2.0, 30.0], [10.0, 1.0, 10.0])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 3.0)
    # The medians, 30 and 10, are of different repetitions: their ratio is none of any.
    ratio = ratio_of([10.0, 30.0, 40.0], [10.0, 40.0, 8.0])
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 0.75, 5.0)


@pytest.mark.parametrize(("values", "baseline"), [([], []), ([1.0], [1.0, 2.0])])
def test_values_that_do_not_pair_are_refused(values: list[float], baseline: list[float]) -> None:
    with pytest.raises(
        OptionError, match=f"{len(values)} values cannot be compared with {len(baseline)}"
    ):
        ratio_of(values, baseline)


def test_no_values_have_no_median() -> None:
    with pytest.raises(OptionError, match="no median of no values"):
        spread_of([])
