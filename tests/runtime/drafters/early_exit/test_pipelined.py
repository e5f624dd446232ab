"""PPD's costs against the schedule itself, over all patterns of right and wrong guesses."""

from __future__ import annotations

import itertools
import math

import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.early_exit.pipelined import (
    most_transfer,
    pipeline_schedule,
    pipelined_time,
    single_device_time,
)

N = 8


def mean_time(hit: float, exit_at: float, overhead: float, devices: int = 2) -> float:
    """The expected time of a further token, from the schedules of N + 1 tokens."""
    total = 0.0
    for pattern in itertools.product((True, False), repeat=N):
        weight = math.prod(hit if right else 1.0 - hit for right in pattern)
        ended = pipeline_schedule(pattern, exit_at, overhead=overhead, devices=devices)
        total += weight * (ended - 1.0)
    return total / N


@pytest.mark.parametrize("hit", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize(("exit_at", "overhead"), [(0.5, 0.0), (0.5, 0.2), (0.8, 0.05), (0.9, 0.3)])
def test_the_formula_is_the_schedules_mean(hit: float, exit_at: float, overhead: float) -> None:
    found = pipelined_time(hit, exit_at, exit_cost=overhead / 2, transfer=overhead / 2)
    assert found == pytest.approx(mean_time(hit, exit_at, overhead), abs=1e-12)


def test_early_exits_need_more_devices() -> None:
    assert pipelined_time(0.6, 0.25, devices=4) == pytest.approx(mean_time(0.6, 0.25, 0.0, 4))
    # With two, a run of right guesses waits for devices: the formula is what it comes to.
    assert pipelined_time(1.0, 0.25) == 0.5
    long = pipeline_schedule([True] * 1000, 0.25) / 1000
    assert long == pytest.approx(0.5, abs=2e-3)


def test_one_device_never_gains() -> None:
    for hit in (0.0, 0.5, 1.0):
        for exit_at in (0.2, 0.5, 0.9):
            assert pipelined_time(hit, exit_at, devices=1) >= 1.0
    assert single_device_time(0.5, 0.5) == 1.25
    assert single_device_time(1.0, 0.5, exit_cost=0.1) == 1.1


def test_the_longest_transfer_gives_the_speed_asked_for() -> None:
    longest = most_transfer(1.3, 0.8, 0.5, exit_cost=0.05)
    assert longest > 0
    time = pipelined_time(0.8, 0.5, exit_cost=0.05, transfer=longest)
    assert 1 / time == pytest.approx(1.3)
    assert most_transfer(1.5, 0.5, 0.5) < 0
    assert most_transfer(2.5, 1.0, 0.1) == -math.inf


def test_numbers_that_make_no_sense_are_refused() -> None:
    for wrong in ({"hit": 1.5}, {"exit_at": -0.1}, {"transfer": -1.0}, {"devices": 0}):
        with pytest.raises(OptionError):
            pipelined_time(**{"hit": 0.5, "exit_at": 0.5, **wrong})  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        most_transfer(0.5, 0.5, 0.5)
