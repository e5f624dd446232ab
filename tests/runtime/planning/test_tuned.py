"""Tuning a pair end to end, and when a stored plan applies."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import ContextFullError, OptionError, PairError
from specrun.bindings.files import cache_folder
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.memory import LoadOptions
from specrun.runtime.planning import measured_acceptance, profile, profile_file, tuned_plan
from specrun.runtime.tuning import (
    Candidate,
    ShapeTrial,
    TuneOptions,
    TuneResult,
    WorkLeft,
    keep_plans,
    tune,
)

pytestmark = pytest.mark.usefixtures("own_cache")

GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
Outcome = tuple[TuneOptions, TuneResult, list[tuple[str, float]]]
CONTEXT = ContextOptions(n_ctx=256, n_threads=1)


@pytest.fixture(scope="module")
def outcome(tiny_model: Path, tiny_flat_twin: Path) -> Outcome:
    told: list[tuple[str, float]] = []
    options = options_for(tiny_model, tiny_flat_twin)
    result = tune(
        options, lambda _: [[5, 6, 7], [8, 9]], lambda what, share, _: told.append((what, share))
    )
    return options, result, told


def options_for(target: Path, draft: Path, **changes: object) -> TuneOptions:
    values = {
        "params": (GREEDY, WARM),
        "n_tokens": 24,
        "seconds": 0.1,
        "loading": LoadOptions(CONTEXT),
        **changes,
    }
    return TuneOptions(target, draft, **values)  # type: ignore[arg-type]


def with_best(result: TuneResult, options: str) -> TuneResult:
    """The result as it would be if these options had been the fastest at every temperature."""
    best = Candidate(options, "chain", "argmax", 3, 3, 2.0, 100.0, 99.0, 2.0)
    plain = Candidate("", "plain", "", 0, 0, 1.0, 50.0, 50.0, 1.0)
    settings = tuple(
        dataclasses.replace(setting, candidates=(best, plain)) for setting in result.settings
    )
    return dataclasses.replace(result, settings=settings)


def ask(
    target: Path, draft: Path, params: SamplingParams = GREEDY, **changes: object
) -> tuple[str | None, list[str]]:
    warnings: list[str] = []
    values = {"options": LoadOptions(CONTEXT), "warn": warnings.append, **changes}
    plan = tuned_plan(target, draft, params, **values)  # type: ignore[arg-type]
    return None if plan is None else plan.expression(draft), warnings


# -- tuning ----------------------------------------------------------------------------------------


def test_tuning_measures_costs_acceptance_and_plain_decoding(
    outcome: Outcome,
) -> None:
    _, result, told = outcome
    assert result.target.sizes[0] == result.draft.sizes[0] == 1
    assert [setting.params for setting in result.settings] == [GREEDY, WARM]
    assert set(result.settings[0].acceptance) == {"argmax"}
    assert set(result.settings[1].acceptance) == {"argmax", "with", "without"}
    for setting in result.settings:
        assert setting.plain.measured
        assert all(
            0.0 <= share <= 1.0 for shares in setting.acceptance.values() for share in shares
        )
        assert all(sum(shares) <= 1.0 + 1e-9 for shares in setting.acceptance.values())
        run = [candidate for candidate in setting.candidates if candidate.measured is not None]
        assert list(setting.candidates[: len(run)]) == sorted(
            run, key=lambda candidate: -candidate.speed
        )
    shares = [share for _, share in told]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert told[-1] == ("done", 1.0)
    json.dumps(result.to_dict())


def test_the_time_left_follows_the_rate_of_the_work() -> None:
    """Work of 100 seconds, twice as slow as expected: no estimate jumps, later ones are right."""
    clock = 0.0
    work, told = WorkLeft(100.0, lambda: clock), []
    for done in range(101):
        clock = 2.0 * done
        told.append((clock, *work.progress(float(done))))
    ends = [clock + left for clock, _, left in told]
    assert ends[0] == 100.0
    assert ends == sorted(ends)
    assert max(b - a for a, b in itertools.pairwise(ends)) <= 10.0 + 1e-9
    assert all(end == pytest.approx(200.0, rel=0.2) for end in ends[25:])
    shares = [share for _, share, _ in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_plans_are_made_and_run_with_the_padding_that_answers_will_have(
    tiny_model: Path, tiny_flat_twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 tokens cost less than 4 or 5: plans count with 8, and batches of 4 have as many."""
    from specrun.runtime.engine import Session
    from specrun.runtime.planning import CostCurve
    from specrun.runtime.tuning import tuning

    sizes, spread = (1, 2, 4, 5, 8, 16), (0.0,) * 6

    def costs(context: object, **_: object) -> CostCurve:
        if context.model.path != tiny_model:  # type: ignore[attr-defined]
            return CostCurve((1, 16), (0.01, 0.02), (0.01, 0.02))
        times = (1.0, 1.3, 2.2, 2.3, 1.4, 4.0)
        return CostCurve(sizes, times, times, spread)

    widths: list[list[int]] = []
    opened = Session.open

    def noted(*arguments: Any, **options: Any) -> Session:
        wider = options["wider"]
        widths.append([] if wider is None else [wider(n, 16) for n in (2, 4, 5, 8)])
        return opened(*arguments, **options)

    monkeypatch.setattr(tuning, "measure_cost_curve", costs)
    monkeypatch.setattr(Session, "open", noted)
    result = tune(options_for(tiny_model, tiny_flat_twin), lambda _: [[5, 6, 7]])
    assert len(widths) > 2
    assert all(found == [2, 8, 8, 8] for found in widths)
    # What is kept and shown is what was measured.
    assert result.target.seconds(4) == 2.2
    small = [each for each in result.settings[0].candidates if 3 <= each.n_nodes <= 7]
    assert small
    # A drafter that is always right: as many tokens as nodes, and one.
    for each in small:
        assert each.predicted == pytest.approx(each.expected_tokens / 1.4, rel=0.2)


def test_a_costly_target_gets_a_plan_that_was_run(
    tiny_model: Path, tiny_flat_twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With curves on which drafting pays, candidates are run and their figures stand beside the
    predicted."""
    from specrun.runtime.planning import CostCurve
    from specrun.runtime.tuning import tuning

    def costs(context: object, **_: object) -> CostCurve:
        unit = 1.0 if context.model.path == tiny_model else 0.01  # type: ignore[attr-defined]
        times = tuple(unit * (1 + size / 64) for size in (1, 2, 4, 8, 16))
        return CostCurve((1, 2, 4, 8, 16), times, times)

    monkeypatch.setattr(tuning, "measure_cost_curve", costs)
    result = tune(options_for(tiny_model, tiny_flat_twin), lambda _: [[5, 6, 7]])
    for setting in result.settings:
        run = [
            candidate
            for candidate in setting.candidates
            if candidate.options and candidate.measured is not None
        ]
        assert run
        if setting.best.options:  # the fastest plan also ran in evaluations of one width
            width = -(-(1 + setting.best.n_nodes) // 4) * 4
            assert (setting.shape.width, setting.shape.left_out) == (width, "")
            assert min(setting.shape.free, setting.shape.fixed) > 0.0
        else:
            assert setting.shape.left_out == "nothing is drafted"
        kinds = [candidate.kind for candidate in run]
        # The twin's favourites are the target's: at temperature 0 nothing beats a chain.
        assert kinds == ["chain"] if setting.params.is_greedy else len(set(kinds)) == len(kinds) > 1
        assert all(
            candidate.mean_accepted_length >= 1.0
            for candidate in run
            if candidate.mean_accepted_length
        )
        for candidate in setting.candidates:
            if candidate.options:
                expression = f'draft("{tiny_flat_twin}", {candidate.options})'
                with Runtime(tiny_model, drafter=expression, n_ctx=256, n_threads=1) as runtime:
                    assert runtime.session.drafter.max_nodes == candidate.n_nodes


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"params": ()}, "no sampling settings"),
        ({"n_tokens": 3}, "give 8 or more"),
        ({"seconds": 0.0}, "more than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tiny_model: Path, tiny_drafter: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        options_for(tiny_model, tiny_drafter, **changes)


def test_pairs_and_prompts_that_do_not_fit_are_refused(
    tiny_model: Path, tiny_drafter: Path, tiny_small_vocab: Path
) -> None:
    with pytest.raises(PairError):
        tune(options_for(tiny_model, tiny_small_vocab), lambda _: [[5, 6, 7]])
    with pytest.raises(ContextFullError, match="raise the context size"):
        tune(options_for(tiny_model, tiny_drafter), lambda _: [[5] * 300])
    for prompts in ([], [[]]):
        with pytest.raises(OptionError, match="prompt is empty"):
            tune(options_for(tiny_model, tiny_drafter), lambda _, prompts=prompts: prompts)


# -- stored plans ----------------------------------------------------------------------------------


@pytest.fixture
def stored(outcome: Outcome, own_cache: Path) -> tuple[Path, Path, Path]:
    options, result, _ = outcome
    path = keep_plans(options, with_best(result, "n=3, sampling=argmax"))
    assert path.is_relative_to(own_cache / "specrun")
    return options.target, options.draft, path


def test_a_stored_plan_is_found_and_its_expression_works(stored: tuple[Path, Path, Path]) -> None:
    target, draft, path = stored
    expression, warnings = ask(target, draft)
    assert warnings == []
    assert expression == f'draft("{draft}", n=3, sampling=argmax)'
    with Runtime(target, drafter=expression, n_ctx=256, n_threads=1) as runtime:
        assert runtime.session.drafter.max_nodes == 3
    assert path == profile_file(target)
    assert [file.name for file in path.parent.iterdir()] == [
        path.name
    ]  # nothing half-written beside it


def test_the_nearest_temperature_is_taken_and_plain_decoding_can_be_the_plan(
    stored: tuple[Path, Path, Path],
) -> None:
    target, draft, path = stored
    content = json.loads(path.read_text())
    content["plans"][0]["plans"][1]["options"] = ""
    path.write_text(json.dumps(content))
    assert ask(target, draft, GREEDY)[0] == f'draft("{draft}", n=3, sampling=argmax)'
    assert (
        ask(target, draft, WARM.replace(temperature=0.3))[0]
        == f'draft("{draft}", n=3, sampling=argmax)'
    )
    assert ask(target, draft, WARM.replace(temperature=1.5)) == ("none", [])


@pytest.mark.parametrize(
    ("fixed", "width"), [(101.0, 8), (99.5, 8), (98.0, None)], ids=["faster", "no slower", "slower"]
)
def test_a_fixed_shape_is_stored_where_it_is_no_slower(
    outcome: Outcome, own_cache: Path, fixed: float, width: int | None
) -> None:
    options, result, _ = outcome
    settings = tuple(
        dataclasses.replace(setting, shape=ShapeTrial(8, 100.0, fixed))
        for setting in result.settings
    )
    path = keep_plans(options, dataclasses.replace(result, settings=settings))
    plan = tuned_plan(options.target, options.draft, GREEDY, LoadOptions(CONTEXT))
    assert plan is not None
    assert plan.width == width
    # Plans from before there were fixed shapes go on to be used.
    path.write_text(path.read_text().replace('"width"', '"not known"'))
    plan = tuned_plan(options.target, options.draft, GREEDY, LoadOptions(CONTEXT))
    assert plan is not None
    assert plan.width is None


def test_without_a_stored_plan_there_is_no_expression(tiny_model: Path, tiny_drafter: Path) -> None:
    assert ask(tiny_model, tiny_drafter) == (None, [])
    assert measured_acceptance(tiny_model, tiny_drafter, "without") is None


def test_a_plan_of_another_machine_is_ignored_with_a_warning(
    stored: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, _ = stored
    monkeypatch.setattr(profile, "describe_machine", lambda: {"cpu": "another"})
    expression, warnings = ask(target, draft)
    assert expression is None
    assert len(warnings) == 1
    assert "another machine" in warnings[0]
    assert "specrun tune again" in warnings[0]


def test_a_plan_for_another_model_of_that_name_is_ignored_with_a_warning(
    tiny_model: Path,
    tiny_flat_twin: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    outcome: Outcome,
) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(tiny_flat_twin.read_bytes())
    keep_plans(options_for(tiny_model, draft), with_best(outcome[1], "n=2"))
    assert ask(tiny_model, draft)[1] == []
    draft.write_bytes(tiny_drafter.read_bytes())
    expression, warnings = ask(tiny_model, draft)
    assert expression is None
    assert "draft.gguf is another file" in warnings[0]
    assert measured_acceptance(tiny_model, draft, "without") is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"options": LoadOptions(ContextOptions(n_ctx=256, n_threads=3))}, "threads 1, not 3"),
        (
            {"options": LoadOptions(ContextOptions(n_threads=1, cache_type_k="q8_0"))},
            "key cache f16, not q8_0",
        ),
        ({"options": LoadOptions(CONTEXT, n_gpu_layers=0)}, "GPU layers auto, not 0"),
    ],
)
def test_a_plan_with_other_settings_is_ignored_with_a_warning(
    stored: tuple[Path, Path, Path], changes: dict[str, object], problem: str
) -> None:
    expression, warnings = ask(*stored[:2], **changes)
    assert expression is None
    assert problem in warnings[0]


def test_a_plan_of_another_format_is_ignored_with_a_warning(
    stored: tuple[Path, Path, Path],
) -> None:
    target, draft, path = stored
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert "another version" in ask(target, draft)[1][0]


def test_a_sequoia_tree_uses_the_acceptance_that_was_measured(
    stored: tuple[Path, Path, Path],
) -> None:
    target, draft, path = stored
    content = json.loads(path.read_text())
    content["machine"] = "another: acceptance does not depend on it"
    content["plans"][0]["plans"][0]["acceptance"] = {"argmax": [0.0, 0.0]}
    content["plans"][0]["plans"][1]["acceptance"] = {
        "argmax": [0.5, 0.5],
        "without": [0.3, 0.29, 0.28],
    }
    path.write_text(json.dumps(content))
    assert measured_acceptance(target, draft, "without") == (0.3, 0.29, 0.28)
    assert measured_acceptance(target, draft, "argmax") == (
        0.0,
        0.0,
    )  # that of the lowest temperature
    with Runtime(
        target, drafter=f'draft("{draft}", tree=sequoia, nodes=3)', n_ctx=256, n_threads=1
    ) as runtime:
        assert (
            runtime.session.drafter.max_leaves == 3
        )  # three siblings are best for such an acceptance


def test_the_cache_folder_follows_the_users_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specrun"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder().is_relative_to(tmp_path)
    assert "relative" not in cache_folder().parts
