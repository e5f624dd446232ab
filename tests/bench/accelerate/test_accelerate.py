"""Accelerating a tiny model end to end: what is kept, what is gone on from, and bad input."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.simulated_machine import FLAT, STEEP, Simulated, SimulatedMachine

from specrun.bench.accelerate import AccelerateOptions, AccelerateResult, accelerate, candidates
from specrun.bench.accelerate.candidates import (
    CutFound,
    FoundDrafter,
    cut_file,
    files_in,
    found_drafters,
)
from specrun.bench.accelerate.prompts import PROMPTS, search_prompts
from specrun.bench.accelerate.target import needed_bytes
from specrun.bench.diagnosis.pair import CurveBeside
from specrun.bindings import files
from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import OptionError, OutOfMemoryError, SpecrunError
from specrun.runtime.engine import RuntimeOptions
from specrun.runtime.laws import SamplingParams
from specrun.runtime.memory import LoadOptions
from specrun.runtime.planning import describe_settings, drafter_for, load_profile, profile_file
from specrun.runtime.round import GenerationResult

CONTEXT = ContextOptions(n_ctx=512, n_threads=1)
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
GOOD = Simulated(0.9, 4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def target(tiny_model: Path, tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return Path(shutil.copy2(tiny_model, tmp_path / "models" / "target.gguf"))


def options(target: Path, **changes: Any) -> AccelerateOptions:
    values = {
        "n_tokens": 8,
        "repetitions": 2,
        "seconds": 30.0,
        "runtime": RuntimeOptions(context=CONTEXT, trust=True),
    }
    return AccelerateOptions(target, (GREEDY,), **{**values, **changes})


def simulated(curve: Any = FLAT, **drafters: Simulated) -> SimulatedMachine:
    known = {name.replace("_", "-"): drafter for name, drafter in drafters.items()}
    return SimulatedMachine(curve, {"questions": known, "edited": known})


def used(target: Path, temperature: float = 0.0) -> str:
    return drafter_for(target, temperature, options=LoadOptions(CONTEXT)).expression


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes time and is tested elsewhere is done in the least."""
    monkeypatch.setattr("specrun.bench.accelerate.target.CURVE_SECONDS", 0.02)
    monkeypatch.setattr("specrun.bench.accelerate.target.FITTED_TOKENS", 8)
    for name in ("_PLAN_SECONDS", "_CUT_SECONDS"):
        monkeypatch.setattr(candidates, name, 0.02)
    monkeypatch.setattr(candidates, "FITTED_TOKENS", 8)
    monkeypatch.setattr(candidates, "_MOST_CUTS", 3)


def test_a_file_is_measured_and_its_profile_is_used(
    target: Path, tiny_flat_twin: Path, tmp_path: Path, cheap: None
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nabcabc\nhello\nabab\n")
    shutil.copy2(tiny_flat_twin, target.with_name("twin.gguf"))
    told: list[str] = []
    result = accelerate(
        options(target, prompts=prompts), lambda status: told.append(status.what), warn=told.append
    )
    assert not result.interrupted
    assert {row.drafter for row in result.rows} == {"prompt-lookup", "lookahead", "auto"}
    assert {row.workload for row in result.rows} == {PROMPTS}
    # The twin is no smaller than its target, so that it is no drafter.
    assert not any("twin" in drafter for drafter in result.sources)
    assert [diagnosis.temperature for diagnosis in result.diagnoses] == [0.0]
    settings = describe_settings(LoadOptions(CONTEXT))
    profile = load_profile(target, settings)
    assert profile is not None
    assert profile.finished
    assert used(target) == profile.choice(0.0).drafter  # type: ignore[union-attr]
    assert not cut_file(target).exists()
    json.dumps(result.to_dict(), allow_nan=False)
    assert any(what.startswith("comparing") for what in told)


def test_the_diagnosis_reads_the_curve_that_was_measured_between_the_answers(
    target: Path, tmp_path: Path, cheap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no memory for a context of its own, that of before."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nabcabc\nhello\nabab\n")
    visits: list[GenerationResult] = []
    visit = CurveBeside.visit

    def noted(beside: CurveBeside, answer: GenerationResult) -> None:
        visits.append(answer)
        visit(beside, answer)

    monkeypatch.setattr(CurveBeside, "visit", noted)
    monkeypatch.setattr(CurveBeside, "curve", lambda _beside: STEEP)
    result = accelerate(options(target, prompts=prompts))
    assert result.curve is STEEP
    assert len(visits) == 4  # behind each of two prompts, in two sweeps

    def no_memory(*_: object) -> None:
        raise OutOfMemoryError("there is none")

    monkeypatch.setattr(CurveBeside, "__init__", no_memory)
    result = accelerate(options(target, prompts=prompts, again=True))
    assert result.curve not in (None, STEEP)
    assert result.diagnoses


def test_a_smaller_model_beside_it_is_planned_and_compared(
    target: Path, tiny_drafter: Path, tmp_path: Path, cheap: None
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nhello\n")
    small = Path(shutil.copy2(tiny_drafter, target.with_name("small.gguf")))
    result = accelerate(options(target, prompts=prompts))
    drafted = [name for name in result.sources if str(small) in name]
    assert f"draft({small})" in [name.replace('"', "") for name in drafted]
    assert any(name.startswith("auto(draft(") for name in drafted)
    assert result.sources[drafted[0]] == "beside it"


def test_what_is_found(target: Path, tiny_drafter: Path, tiny_small_vocab: Path) -> None:
    small = Path(shutil.copy2(tiny_drafter, target.with_name("small.gguf")))
    shutil.copy2(tiny_small_vocab, target.with_name("stranger.gguf"))
    shutil.copy2(target, target.with_name("same-size.gguf"))
    target.with_name("broken.gguf").write_bytes(b"GGUF")
    assert found_drafters(target) == [FoundDrafter(small, "draft", "beside it")]


def test_what_is_named_is_tried_first_and_once(
    target: Path, tiny_drafter: Path, tiny_small_vocab: Path, tmp_path: Path
) -> None:
    small = Path(shutil.copy2(tiny_drafter, target.with_name("small.gguf")))
    # Of another vocabulary: nobody would find it, but it may draft.
    named = [tiny_small_vocab, small]
    found = found_drafters(target, named)
    assert found == [FoundDrafter(path, "draft", "named") for path in named]
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(SpecrunError):
        accelerate(options(target, drafts=(broken,)), machine=simulated())


def test_each_kind_of_text_has_its_own_reason(target: Path) -> None:
    """Nothing repeats in answers to questions; where edits pay there is nothing to explain."""
    silent, quoting = Simulated(0.1, 3, coverage=0.02), Simulated(0.9, 6, coverage=0.9)
    machine = SimulatedMachine(
        FLAT, {"questions": {"prompt-lookup": silent}, "edited": {"prompt-lookup": quoting}}
    )
    result = accelerate(options(target), machine=machine)
    assert [(found.workload, found.pays) for found in result.diagnoses] == [
        ("questions", False),
        ("edited", True),
    ]
    reasons = {choice.workload: choice.reason for choice in result.choices}
    assert reasons["questions"] == "little repeats"
    assert reasons["edited"] == ""


def test_choices_follow_the_measurements(target: Path) -> None:
    good = accelerate(options(target), machine=simulated(prompt_lookup=GOOD))
    assert {choice.drafter for choice in good.choices} == {"prompt-lookup"}
    assert used(target) == "prompt-lookup"
    poor = accelerate(
        options(target, again=True), machine=simulated(STEEP, prompt_lookup=Simulated(0.2, 3))
    )
    assert {choice.drafter for choice in poor.choices} == {"none"}
    assert all(choice.reason == "drafts are accepted too seldom" for choice in poor.choices)
    assert used(target) == "none"


def test_a_second_call_goes_on_and_another_basis_begins_anew(target: Path) -> None:
    machine = simulated(prompt_lookup=GOOD)
    accelerate(options(target), machine=machine)
    count = machine.n_sweeps
    accelerate(options(target), machine=machine)
    assert machine.n_sweeps == count
    accelerate(options(target, n_tokens=16), machine=machine)
    assert machine.n_sweeps == 2 * count
    accelerate(options(target, n_tokens=16, again=True), machine=machine)
    assert machine.n_sweeps == 3 * count


def test_ctrl_c_keeps_what_is_known(target: Path) -> None:
    machine = simulated(prompt_lookup=GOOD)
    machine.interrupt_at = 2  # each workload was swept once
    result = accelerate(options(target), machine=machine)
    assert result.interrupted
    assert used(target) == "prompt-lookup"
    settings = describe_settings(LoadOptions(CONTEXT))
    assert not load_profile(target, settings).finished  # type: ignore[union-attr]
    again = accelerate(options(target), machine=machine)
    assert not again.interrupted
    assert machine.n_sweeps == 4


def test_ctrl_c_before_anything_was_compared_leaves_the_earlier_choice(target: Path) -> None:
    accelerate(options(target), machine=simulated(prompt_lookup=GOOD))
    machine = simulated(lookahead=GOOD)
    machine.interrupt_at = 0
    assert accelerate(options(target, again=True), machine=machine).interrupted
    assert used(target) == "prompt-lookup"


def test_a_full_disk_is_a_sentence_and_nothing_is_half_written(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate(options(target), machine=simulated(prompt_lookup=GOOD))
    before = profile_file(target).read_bytes()

    def fail(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_sync_file", fail)
    with pytest.raises(SpecrunError, match="the disk is full"):
        accelerate(options(target, again=True), machine=simulated(lookahead=GOOD))
    assert profile_file(target).read_bytes() == before
    assert [path.name for path in profile_file(target).parent.iterdir()] == [
        profile_file(target).name
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hours": -2.0}, "-2 hours are no time"),
        ({"memory": 0}, "0 bytes of memory hold nothing"),
        ({"n_tokens": 1}, "answers of 1 tokens are too short"),
        ({"repetitions": 0}, "0 repetitions measure nothing"),
        ({"seconds": 0.0}, "0.0 seconds are no time"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    target: Path, changes: dict[str, Any], message: str
) -> None:
    machine = simulated()
    with pytest.raises(OptionError, match=message):
        accelerate(options(target, **changes), machine=machine)
    assert machine.called == []
    assert not profile_file(target).exists()


def test_little_memory_leaves_out_what_needs_more(
    target: Path, tiny_drafter: Path, tmp_path: Path, cheap: None
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n")
    small = Path(shutil.copy2(tiny_drafter, target.with_name("small.gguf")))
    context = dataclasses.replace(CONTEXT, n_ctx=256)  # as much as these prompts need
    plain, pair = (
        needed_bytes(target, drafter, context) for drafter in ("none", f'draft("{small}")')
    )
    assert plain + small.stat().st_size * 0.9 < pair
    result = accelerate(options(target, prompts=prompts, memory=pair - 1))
    assert not any(str(small) in name for name in result.sources)
    (left,) = (found for found in result.left_out if found.what == "small.gguf")
    assert "are allowed" in left.why


def test_a_model_without_template_continues_texts(
    tiny_small_vocab: Path, tmp_path: Path, cheap: None
) -> None:
    target = Path(shutil.copy2(tiny_small_vocab, tmp_path / "plain.gguf"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n")
    result = accelerate(options(target, prompts=prompts))
    assert result.rows


def test_prompts_are_split_into_fitted_and_held_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(40)))
    prompts = search_prompts(path)
    held_out = prompts.held_out[PROMPTS]
    assert len(prompts.fitting) == len(held_out) == 6
    assert not set(prompts.fitting) & set(held_out)
    assert search_prompts(None).digest != prompts.digest
    few = tmp_path / "few.txt"
    few.write_text("a\nb\n")
    assert search_prompts(few).fitting == search_prompts(few).held_out[PROMPTS] == ("a", "b")


def test_what_is_compared_on_is_no_built_in_prompt() -> None:
    """Heads learn from answers to those: a head would be compared on what it has learnt."""
    from specrun.train.data import built_in_prompts, most_prompts

    learnt = {document.prompt for document in built_in_prompts(most_prompts())}
    prompts = search_prompts(None)
    compared = {*prompts.fitting, *(each for some in prompts.held_out.values() for each in some)}
    assert len(compared) > 6
    assert not compared & learnt


def test_a_head_that_comes_with_specrun_is_found_for_its_vocabulary_alone(
    target: Path, tiny_drafter: Path, tiny_small_vocab: Path, tmp_path: Path, monkeypatch
) -> None:
    for source, found in ((tiny_drafter, True), (tiny_small_vocab, False)):
        shipped = Path(shutil.copy2(source, tmp_path / f"shipped-{found}.gguf"))
        monkeypatch.setattr(candidates, "shipped_heads", lambda path=shipped: [path])
        wanted = [FoundDrafter(shipped, "draft", "comes with specrun")] if found else []
        assert found_drafters(target) == wanted


def test_the_built_in_prompts_to_edit_are_taken_for_such() -> None:
    from specrun.runtime.planning import workload_of

    for workload, prompts in search_prompts(None).held_out.items():
        assert {workload_of(prompt) for prompt in prompts} == {workload}


def test_files_of_an_expression(target: Path) -> None:
    assert files_in(f'auto(draft("{target}", n=3), prompt-lookup)') == [str(target)]
    assert files_in("none") == []


def test_a_cut_that_was_not_chosen_is_removed(target: Path) -> None:
    path = cut_file(target)
    path.parent.mkdir(parents=True)
    shutil.copy2(target, path)
    cut = f'draft("{path}", n=3)'
    machine = simulated(prompt_lookup=GOOD)
    machine.cut_found = CutFound(cut, 1.4, "2-3")
    result: AccelerateResult = accelerate(options(target), machine=machine)
    assert not path.exists()
    assert cut in {left.what for left in result.left_out}
    shutil.copy2(target, path)
    machine = SimulatedMachine(FLAT, {"questions": {cut: GOOD}, "edited": {cut: GOOD}})
    machine.cut_found = CutFound(cut, 1.4, "2-3")
    kept = accelerate(options(target, again=True), machine=machine)
    assert {choice.drafter for choice in kept.choices} == {cut}
    assert path.exists()
    assert used(target) == cut


def test_several_temperatures_have_choices_of_their_own(target: Path) -> None:
    both = dataclasses.replace(options(target), params=(GREEDY, WARM))
    result = accelerate(both, machine=simulated(prompt_lookup=GOOD))
    assert {choice.temperature for choice in result.choices} == {0.0, 0.8}
