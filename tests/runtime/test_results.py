"""Token events: log-probabilities are computed only for events somebody keeps, and stay right."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from specrun.bindings.errors import StaleViewError
from specrun.runtime.laws.transform import log_probability
from specrun.runtime.round import TokenEvent
from specrun.runtime.round.results import LogprobKeeper


class Row:
    """A row of logits that dies with the next evaluation; counts how often it was read."""

    def __init__(self, seed: int) -> None:
        self.logits = np.random.default_rng(seed).standard_normal(50).astype(np.float32)
        self.expected = log_probability(self.logits.copy(), 7)
        self.reads = 0
        self.stale = False

    def logits_of(self, index: int) -> np.ndarray:
        if self.stale:
            raise StaleViewError("overwritten")
        self.reads += 1
        return self.logits

    def die(self) -> None:
        self.stale = True
        self.logits[:] = np.nan  # llama.cpp reuses the memory


def event(row: Row) -> TokenEvent:
    return TokenEvent("x", 7, "target", 0, row)


def play(keeper: LogprobKeeper, rows: list[Row], hold: list[int]) -> list[TokenEvent]:
    """A round whose events are all dropped but those at `hold`, and the evaluation after it."""
    kept = []
    for index, row in enumerate(rows):
        made = event(row)
        keeper.current.append(weakref.ref(made))
        if index in hold:
            kept.append(made)
        del made
    keeper.before_evaluation()
    for row in rows:
        row.die()
    return kept


@pytest.mark.parametrize("hold", [[], [0], [1], [2], [0, 1, 2]], ids=str)
def test_what_is_held_stays_readable(hold):
    rows = [Row(seed) for seed in range(3)]
    kept = play(LogprobKeeper(), rows, hold)
    assert [kept_event.logprob for kept_event in kept] == [rows[index].expected for index in hold]


def test_what_nobody_holds_costs_nothing():
    gc.collect()
    rows = [Row(seed) for seed in range(3)]
    play(LogprobKeeper(), rows, [])
    assert [row.reads for row in rows] == [0, 0, 0]


def test_the_last_event_is_copied_not_computed_until_asked():
    """A `for` loop always holds one: a copy is cheaper than a softmax."""
    rows = [Row(0)]
    (kept,) = play(LogprobKeeper(), rows, [0])
    assert kept._logprob is None
    assert kept.logprob == rows[0].expected


def test_a_copy_still_held_a_round_later_becomes_a_number():
    keeper = LogprobKeeper()
    first, second = [Row(0)], [Row(1)]
    (kept,) = play(keeper, first, [0])
    play(keeper, second, [])
    assert kept._logprob == first[0].expected  # and the row's copy can go


def test_the_last_answers_copy_becomes_a_number():
    keeper, row = LogprobKeeper(), Row(0)
    (kept,) = play(keeper, [row], [0])
    keeper.finish()
    assert (kept._logprob, kept._row, keeper._room) == (row.expected, None, None)


class HoldsItsRow(TokenEvent):
    """Keeps what its number was computed from."""

    __slots__ = ("_held",)

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._held = self._decided_by


def bytes_held(kind: Callable[..., TokenEvent]) -> int:
    """Bytes that 600 collected events hold, two a round, whose laws are 32,000 wide."""
    keeper, events = LogprobKeeper(), []
    tracemalloc.start()
    try:
        for number in range(300):
            rows = np.zeros((2, 32_000), np.float32)
            for row in rows:
                decided_by = SimpleNamespace(logits_of=lambda _, row=row: row)
                events.append(kind("x", 7, "target", number, decided_by))
                keeper.current.append(weakref.ref(events[-1]))
            del rows, row, decided_by
            keeper.before_evaluation()
        keeper.finish()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len({event.logprob for event in events}) == 1
    return held


def test_a_collected_answer_holds_numbers_not_laws():
    assert bytes_held(TokenEvent) < 1_000_000
    assert bytes_held(HoldsItsRow) > 50_000_000


def test_a_value_read_in_time_is_kept():
    row = Row(0)
    made = event(row)
    value = made.logprob
    row.die()
    assert made.logprob == value == row.expected
    assert row.reads == 1


def test_an_event_nobody_saved_is_stale_not_wrong():
    row = Row(0)
    made = event(row)
    row.die()
    with pytest.raises(StaleViewError):
        _ = made.logprob


def test_events_print_without_computing():
    row = Row(0)
    assert "token_id=7" in repr(event(row))
    assert row.reads == 0
