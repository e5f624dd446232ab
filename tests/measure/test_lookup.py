"""`measure lookup`: retrieval timed without a model."""

from __future__ import annotations

import pytest
from support.commands import results_of, run_measure

from measure.lookup import LookupOptions, measure_lookup
from specrun.bindings.errors import MalformedFileError, OptionError
from specrun.runtime.demo import demo_questions


@pytest.fixture
def small_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("measure.lookup._STORE_TOKENS", 20_000)


@pytest.mark.usefixtures("small_store")
def test_lookups_are_timed_without_a_model() -> None:
    results = list(measure_lookup(LookupOptions(contexts=(50, 500), rounds=20)))
    assert [(result.drafter, result.context) for result in results] == [
        *(("prompt-lookup", 50), ("rest", 50), ("prompt-lookup", 500), ("rest", 500))
    ]
    assert all(result.round_us.n == 20 and result.round_us.median > 0 for result in results)
    assert any(result.accepted_per_round > 0.1 for result in results)
    assert all(result.accepted_per_round <= result.drafted_per_round for result in results)
    with pytest.raises(OptionError, match="contexts and rounds are 1 or more"):
        LookupOptions(contexts=(0,))
    with pytest.raises(MalformedFileError):
        list(measure_lookup(LookupOptions(store=demo_questions())))


@pytest.mark.usefixtures("small_store")
def test_lookup_on_the_command_line() -> None:
    done = run_measure("lookup --context 50 --rounds 5 --json")
    assert [result["drafter"] for result in results_of(done)] == ["prompt-lookup", "rest"]
    markdown = run_measure("lookup --context 50 --rounds 5 -o md").stdout
    assert markdown.startswith("| drafter ")
