"""The load of other programs, from times that the test says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specrun.bindings.machine import other_load
from specrun.bindings.machine.other_load import OtherLoad, Times, read_times

Load = Callable[..., OtherLoad]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Seconds pass one by one; this program works with all its threads, others with so many."""
    monkeypatch.setattr(other_load, "_SPARE", 0.25)  # tests of other things do not look at load
    monkeypatch.setattr(other_load, "_LOOK_SECONDS", 0.0)

    def made(n_threads: int, *others: float, n_processors: int = 2) -> OtherLoad:
        times = [Times(0.0, 0.0, 0.0)]
        for busy in others:
            clock, worked, own = times[-1].clock, times[-1].worked, times[-1].own
            times.append(Times(clock + 1.0, worked + n_threads + busy, own + n_threads))
        left = iter(times)
        monkeypatch.setattr(other_load, "read_times", lambda: next(left, None))
        monkeypatch.setattr(other_load.os, "cpu_count", lambda: n_processors)
        return OtherLoad(n_threads)

    return made


def test_others_are_counted_without_this_programs_own_work(load: Load) -> None:
    counted = load(2, 0.0, 1.5, 0.2)
    assert [counted.since_last() for _ in range(3)] == pytest.approx([0.0, 1.5, 0.2])


@pytest.mark.parametrize(
    ("n_threads", "n_processors", "others", "disturbs"),
    [(2, 2, 0.2, False), (2, 2, 0.3, True), (8, 64, 50.0, False), (8, 64, 57.0, True)],
)
def test_others_disturb_if_processors_are_short(
    load: Load, n_threads: int, n_processors: int, others: float, disturbs: bool
) -> None:
    said = load(n_threads, others, n_processors=n_processors).disturbance()
    words = f"other programs used {others:.1f} of {n_processors} processors"
    assert said == (words if disturbs else "")


def test_a_look_counts_only_its_own_moment(load: Load) -> None:
    assert load(2, 5.0, 0.0).now() == ""
    assert load(2, 0.0, 5.0).now() == "other programs used 5.0 of 2 processors"


def test_where_times_are_unknown_nothing_disturbs(load: Load) -> None:
    assert load(2).now() == ""  # of one time alone


def test_the_systems_times_go_on() -> None:
    before, after = read_times(), read_times()
    if before is not None and after is not None:
        assert after.worked >= before.worked
        assert after.own >= before.own > 0.0
