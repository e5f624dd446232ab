"""`specrun tune`: tables, JSON and a picture of what was measured, and a plan that is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from support.commands import run

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.runtime.laws import SamplingParams
from specrun.runtime.memory import LoadOptions
from specrun.runtime.planning import CostCurve, load_curve, profile_file, tuned_plan
from specrun.runtime.tuning import WeightType

from ..conftest import Models

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_cache")]

FAST = ("-t", "1", "-c", "256", "-n", "16", "--seconds", "0.05")


def tune(*arguments: str | Path) -> Result:
    return run("tune", *arguments)


def pair(models: Models) -> tuple[str | Path, ...]:
    return ("-m", models.target, "-md", models.plain)


def test_what_was_measured_is_printed_and_the_plan_is_kept(models: Models) -> None:
    result = tune(*pair(models), *FAST, "--temp", "0,0.8", "-v")
    assert result.exit_code == 0, result.output
    first, *_ = result.stdout.splitlines()
    assert re.match(r"Drafting with .*plain.* answers at temperature 0 ", first), first
    for title in (
        "What an evaluation costs:",
        "Accepted by rank, temperature 0:",
        "Plans, temperature 0.8:",
        "Theory of chains",
    ):
        assert title in result.stdout
    assert "no drafting" in result.stdout
    assert result.stdout.count("Drafting with ") == 2
    title = "Drawn drafts, alpha = mean sum min(p, q) (Leviathan et al. 2023), temperature 0.8:"
    table = result.stdout.split(title, 1)[1].split("\nPlans", 1)[0]
    for name in (f"draft({models.plain.name})", "ngram(order=2)", "ngram(order=3)"):
        assert name in table
    assert "alpha" not in result.stdout.split("Theory of chains", 1)[1]
    path = profile_file(models.target)
    assert str(path) in result.stderr
    (kept,) = json.loads(path.read_text())["plans"]
    assert [plan["temperature"] for plan in kept["plans"]] == [0.0, 0.8]
    # As chat and generate ask for it, with the same options.
    warnings: list[str] = []
    context = ContextOptions(n_ctx=256, n_threads=1)
    found = tuned_plan(
        models.target, models.plain, SamplingParams(), LoadOptions(context), warn=warnings.append
    )
    assert found is not None
    assert warnings == []


def test_alpha_of_other_drafters_stands_beside_the_draft_models(models: Models) -> None:
    others = ("--drafter", "early-exit(layers=1, n=2)", "--drafter", f"draft({models.target}, n=2)")
    result = tune(*pair(models), *FAST, "--temp", "1", "--no-save", "--json", *others)
    assert result.exit_code == 0, result.output
    (setting,) = json.loads(result.stdout)["settings"]
    rows = {row["drafter"]: row for row in setting["alpha"]}
    own = f"draft({models.plain.name})"
    assert list(rows)[:3] == [own, "ngram(order=2)", "ngram(order=3)"]
    assert len(rows) == 5
    # Drawn drafts have an alpha, ranks have shares.
    drawn = setting["acceptance_by_rank"]["with"][0]
    assert rows[own]["alpha"] == pytest.approx(drawn, abs=1e-9)
    assert rows[f"draft({models.target}, n=2)"]["alpha"] == pytest.approx(1.0, abs=1e-3)
    assert 0.0 < rows["early-exit(layers=1, n=2)"]["alpha"] < 1.0
    for row in rows.values():
        assert row["alpha"] == row["theory"]["acceptance"]
        assert row["theory"]["cost_ratio"] > 0.0
        assert row["bytes"] > 0.0
    refused = tune(*pair(models), *FAST, "--drafter", "prompt-lookup")
    assert refused.exit_code != 0
    assert "prompt-lookup has no distribution" in refused.output + str(refused.exception)
    alone = tune("-m", models.target, *FAST, "--drafter", "ngram")
    assert alone.exit_code == 2
    assert "give -md FILE too" in alone.output


def test_without_a_draft_model_the_targets_costs_are_measured_and_kept(models: Models) -> None:
    result = tune("-m", models.target, *FAST)
    assert result.exit_code == 0, result.output
    assert "What an evaluation costs:" in result.stdout
    with Model(models.target) as model:
        kept = load_curve(model.path, ContextOptions(n_ctx=256, n_threads=1), 0)
    assert kept is not None
    assert kept.sizes[:3] == (1, 2, 3)
    assert "prompt-lookup" in result.stderr
    found = json.loads(tune("-m", models.target, *FAST, "--json", "--no-save").stdout)
    assert found["target_costs"]["sizes"][:3] == [1, 2, 3]


def test_weight_types_beside_the_target_are_compared(models: Models, tmp_path: Path) -> None:
    """Those that were measured stand in the table, of the others it says how to measure them; a
    file of another name is none of them."""
    names = ("tiny-F32.gguf", "tiny-F16.gguf", "tiny-Q8_0.gguf", "tinier-F16.gguf")
    for number, name in enumerate(names):  # their content differs, as that of weight types does
        (tmp_path / name).write_bytes(models.target.read_bytes() + number * b"\0")
    first = tune("-m", tmp_path / "tiny-F32.gguf", *FAST)
    assert first.exit_code == 0, first.output
    assert f"not measured: specrun tune -m {tmp_path / 'tiny-F16.gguf'}" in first.stderr
    assert "gains most" not in first.stdout
    second = tune("-m", tmp_path / "tiny-F16.gguf", *FAST)
    assert "drafting gains most with tiny-F" in second.stdout
    assert "tiny-Q8_0.gguf" in second.stdout
    assert "tinier" not in second.output
    found = json.loads(tune("-m", tmp_path / "tiny-F16.gguf", *FAST, "--json").stdout)
    gains = {Path(known["file"]).name: known["gain"] for known in found["weight_types"]}
    assert set(gains) == {"tiny-F32.gguf", "tiny-F16.gguf", "tiny-Q8_0.gguf"}
    assert gains["tiny-Q8_0.gguf"] is None
    assert gains["tiny-F32.gguf"] >= 1.0 - 1e-9


def test_the_gain_is_that_of_the_best_chain() -> None:
    """Free width: 10 tokens of which 8 in 10 are accepted; twice the time for two: no drafting."""
    free = WeightType(Path("a.gguf"), CostCurve.flat([1.0] * 11))
    assert free.gain == pytest.approx(sum(0.8**n for n in range(11)))
    assert WeightType(Path("a.gguf"), CostCurve.flat([1.0, 2.0, 3.0])).gain == 1.0
    steps = WeightType(Path("a.gguf"), CostCurve.flat([0.5, 0.8, 0.85, 0.85, 1.3]))
    assert steps.gain == pytest.approx((1 + 0.8 + 0.64 + 0.512) * 0.5 / 0.85)


def test_json_holds_every_figure(models: Models) -> None:
    result = tune(*pair(models), *FAST, "--temp", "0.8", "--json", "--no-save")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert set(content) == {"target", "draft", "target_costs", "draft_costs", "settings", "seconds"}
    assert content["target_costs"]["sizes"][:3] == [1, 2, 3]
    (setting,) = content["settings"]
    assert setting["temperature"] == 0.8
    assert set(setting["acceptance_by_rank"]) == {"argmax", "without", "with"}
    assert {"options", "predicted", "measured", "expected_tokens"} <= set(setting["plans"][0])
    assert {"acceptance", "cost_ratio", "improvement", "operations"} <= set(setting["theory"])
    assert not profile_file(models.target).exists()


def test_curves_and_plans_are_drawn(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.svg"
    assert (
        tune(
            *pair(models), *FAST, "--temp", "0", "--no-save", "--plot", picture, "-p", "abc"
        ).exit_code
        == 0
    )
    text = picture.read_text()
    assert text.startswith("<?xml")
    assert len(text) > 5_000


def test_what_cannot_be_tuned_is_refused_before_anything_is_measured(
    models: Models, tmp_path: Path
) -> None:
    cases = [
        (("-md", models.plain), 2, "no model is given"),
        (("-m", models.target, "--plot", "plan.png"), 2, "give -md FILE too"),
        (("-m", tmp_path / "none.gguf"), 3, "no file"),
        ((*pair(models), "--demo"), 2, "exclude each other"),
        ((*pair(models), "--temp", "warm"), 2, "list of numbers"),
        ((*pair(models), "-n", "3"), 2, "3"),
        (("-m", models.target, "-md", tmp_path / "none.gguf"), 3, "no file"),
        (("-m", models.target, "-md", models.stranger), 4, "cannot draft for"),
        ((*pair(models), "--plot", "plan.txt"), 2, "not a picture"),
        ((*pair(models), "-c", "64", "-n", "200", "-p", "abc"), 5, "raise the context size"),
    ]
    for arguments, code, problem in cases:
        result = tune(*arguments, *(FAST if "-n" not in arguments else FAST[:2]))
        assert result.exit_code == code, (arguments, result.output)
        assert problem in result.stderr, (arguments, result.stderr)
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
    assert not profile_file(models.target).exists()


def test_generate_drafts_as_the_kept_plan_says_where_md_says_nothing_else(models: Models) -> None:
    assert tune(*pair(models), *FAST, "--temp", "0").exit_code == 0
    path = profile_file(models.target)

    def keep(plan: str, width: int | None) -> None:
        content = json.loads(path.read_text())
        content["plans"][0]["plans"][0] |= {"options": plan, "width": width}
        path.write_text(json.dumps(content))

    def generated(*arguments: str) -> tuple[str, int | None, str]:
        options = ["-t", "1", "-c", "256", "-p", "abc", "-n", "4", "--temp", "0", "--json"]
        command = [*pair(models), *options]
        result = run("generate", *command, *arguments)
        assert result.exit_code == 0, result.output
        stats = json.loads(result.stdout)["stats"]
        return str(stats["drafter"]), stats["width"], result.stderr

    keep("", None)
    assert generated()[:2] == ("none", None)
    for width in (None, 4):
        keep("n=2, sampling=argmax", width)
        drafter, used, said = generated()
        assert "n=2, sampling=argmax" in drafter
        assert used == width
        assert (f"every evaluation has {width} tokens" in said) == (width is not None)
    # What is typed comes before the plan.
    assert generated("--shape", "free")[1] is None
    assert generated("--shape", "8")[1] == 8
    drafter, used, _ = generated("--spec-draft-n-max", "3")
    assert "n=3" in drafter
    assert used is None


def test_mixtures_of_experts_are_warned_of_with_figures(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "mixture of experts" not in tune("-m", models.target, *FAST, "--no-save").stderr
    monkeypatch.setattr("specrun.runtime.planning.mixture", lambda _: (64, 8))
    for command in (("-m", models.target), (*pair(models), "--temp", "0")):
        said = " ".join(tune(*command, *FAST, "--no-save").stderr.split())
        assert "a mixture of experts, 8 of 64 for a token; 2, 4 and 8 tokens read about" in said
        assert "15.0, 26.5, 42.0 of a layer's" in said
        assert "measured here: T(2) = " in said
