"""The load of other programs, from times that the test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specrun.bindings.machine import other_load
from specrun.bindings.machine.other_load import OtherLoad, Times, read_times


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_load, "_SPARE", 0.25)  # tests of other things do not look at load


def load(n_threads: int, *others: float, n_processors: int = 2) -> OtherLoad:
    """Seconds pass one by one; this program works with all its threads, others with so many."""

    def times() -> Iterator[Times]:
        worked = own = 0.0
        yield Times(0.0, 0.0, 0.0)
        for second, busy in enumerate(others, 1):
            own += n_threads
            worked += n_threads + busy
            yield Times(float(second), worked, own)

    made = times()
    return OtherLoad(n_threads, n_processors=n_processors, read=lambda: next(made), wait=print)


def test_others_are_counted_without_this_programs_own_work() -> None:
    counted = load(2, 0.0, 1.5, 0.2)
    assert [counted.since_last() for _ in range(3)] == pytest.approx([0.0, 1.5, 0.2])


@pytest.mark.parametrize(
    ("n_threads", "n_processors", "others", "disturbs"),
    [(2, 2, 0.2, False), (2, 2, 0.3, True), (8, 64, 50.0, False), (8, 64, 57.0, True)],
)
def test_others_disturb_if_processors_are_short(
    n_threads: int, n_processors: int, others: float, disturbs: bool
) -> None:
    said = load(n_threads, others, n_processors=n_processors).disturbance()
    words = f"other programs used {others:.1f} of {n_processors} processors"
    assert said == (words if disturbs else "")


def test_a_look_counts_only_its_own_moment() -> None:
    assert load(2, 5.0, 0.0).now() == ""
    assert load(2, 0.0, 5.0).now() == "other programs used 5.0 of 2 processors"


def test_where_times_are_unknown_nothing_disturbs() -> None:
    assert OtherLoad(2, read=lambda: None, wait=print).now() == ""


def test_the_systems_times_go_on() -> None:
    before, after = read_times(), read_times()
    if before is not None and after is not None:
        assert after.worked >= before.worked
        assert after.own >= before.own > 0.0
