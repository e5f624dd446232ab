"""`measure soak --parallel`: sound engines pass, wrong texts are reported, nothing grows."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from support.commands import results_of
from support.commands import run_measure as run

from measure.soak.engine_soak import soak_engine
from measure.soak.resources import growth_of, read_resources
from measure.soak.soak import SoakOptions
from specrun.runtime import SamplingParams
from specrun.runtime.engine import Engine
from specrun.runtime.engine.slots import SlotTarget
from specrun.runtime.round.target import EvaluatedRows, PlacedRows

GREEDY = SamplingParams(temperature=0.0)


def held(waves: int) -> SoakOptions:
    return SoakOptions(seconds=float("inf"), sessions=waves)


def test_a_sound_engine_passes() -> None:
    result = soak_engine(held(5), 4)
    assert result.failures == ()
    assert result.passed
    assert result.answers > 40
    assert 0 < result.cut < result.answers
    assert {"none", "cancelled"} <= set(result.faults)
    assert set(result.drafters) == {"draft", "medusa", "none", "prompt-lookup"}


def test_an_engine_that_forgets_to_drop_rejected_tokens_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether a text goes wrong or llama.cpp refuses its positions depends on who shares a round.
    monkeypatch.setattr(SlotTarget, "_drop", lambda self, start: None)
    result = soak_engine(held(3), 4)
    assert result.failures
    assert not result.passed


def test_an_engine_that_mixes_up_conversations_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first_rows(rows: EvaluatedRows, places: range) -> PlacedRows:
        return PlacedRows(rows, range(len(places)))

    monkeypatch.setattr("specrun.runtime.engine.slots.PlacedRows", first_rows)
    result = soak_engine(held(3), 4)
    assert not result.passed
    assert any("is not a fresh session's" in failure for failure in result.failures)


def test_nothing_grows_over_hundreds_of_requests(tiny_model: Path) -> None:
    samples = []
    gc.freeze()  # what the other tests hold is looked through with every sample otherwise
    with Engine(tiny_model, "prompt-lookup", slots=3, n_ctx=512, n_threads=1) as engine:
        for number in range(100):
            streams = [
                engine.submit([5 + number % 7, 3, 9, 3, 9, 3], GREEDY, max_tokens=most)
                for most in (1, 2, 100)
            ]
            next(streams[2])
            streams[2].cancel()
            assert all(stream.result.token_ids for stream in streams)
            samples.append(read_resources())
        assert engine.statistics().busy == engine.statistics().queued == 0
    gc.unfreeze()
    for growth in growth_of(samples):
        assert growth.is_flat, f"{growth.name} grew from {growth.before} to {growth.after}"


def test_the_command_reports_waves() -> None:
    done = run("soak", "--parallel", "3", "--sessions", "2", "--json")
    assert done.exit_code == 0, done.output
    (found,) = results_of(done)
    assert found["sessions"] == 2
    assert found["failures"] == []
