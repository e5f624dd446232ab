"""`specrun accelerate` and `specrun why`: what they print, keep and refuse."""

from __future__ import annotations

import errno
import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.simulated_machine import FLAT, STEEP, Simulated, SimulatedMachine

from specrun.bindings import files
from specrun.runtime.planning import CostCurve

from .conftest import ENDLESS, Models, Run

LOOKUP = "prompt-lookup"
GOOD, POOR = Simulated(0.9, 4), Simulated(0.2, 3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a simulated machine measure, with a drafter of this quality."""

    def simulate(curve: CostCurve, drafter: Simulated) -> SimulatedMachine:
        known = {LOOKUP: drafter}
        simulated = SimulatedMachine(curve, {"questions": known, "edited": known})

        api = importlib.import_module("specrun.bench.accelerate.accelerate")
        monkeypatch.setattr(api, "ThisMachine", lambda *_: nullcontext(simulated))
        return simulated

    return simulate


def test_the_choice_is_printed_kept_and_used(run: Run, models: Models, machine: Any) -> None:
    machine(FLAT, GOOD)
    result = run("accelerate", models.target, "--temp", 0)
    assert result.exit_code == 0, result.stderr
    assert "Times the speed of plain decoding, temperature 0" in result.stdout
    assert "texts of all kinds, temperature 0: prompt-lookup, 3." in result.stdout
    assert "Drafting with prompt-lookup makes answers about 3." in result.stdout.splitlines()[0]
    assert "kept in" in result.stderr
    assert "chat, generate and serve use this for target.gguf from now on" in result.stderr
    answer = run("generate", "-m", models.target, "-p", "x", "-n", 2, "--json")
    assert json.loads(answer.stdout)["stats"]["drafter"] == LOOKUP
    assert "profile: prompt-lookup" in answer.stderr


def test_where_nothing_pays_it_says_why_and_what_would_help(
    run: Run, models: Models, machine: Any
) -> None:
    machine(STEEP, POOR)
    result = run("accelerate", "-m", models.target, "--temp", 0)
    assert result.exit_code == 0
    assert "plain decoding, as nothing is faster: drafts are accepted too seldom" in result.stdout
    assert result.stdout.startswith("Nothing that was tried makes answers faster")
    assert "makes answers to questions at temperature 0 slower: about 0." in result.stdout
    assert "the drafter is too weak" in result.stdout
    assert "the cost curve is steep: 2, 4 and 8 tokens take 1.7, 2.0, 3.5 times" in result.stdout
    assert "What would help: another weight type" in result.stdout
    assert "from now on" not in result.stderr
    answer = run("generate", "-m", models.target, "-p", "x", "-n", 2, "--temp", 0)
    assert "specrun accelerate found nothing faster" in answer.stderr


def test_other_weight_types_beside_it_are_named(
    run: Run, models: Models, machine: Any, tmp_path: Path
) -> None:
    machine(STEEP, POOR)
    for name in ("model-F16.gguf", "model-Q8_0.gguf"):
        (tmp_path / name).write_bytes(models.target.read_bytes())
    result = run("accelerate", tmp_path / "model-F16.gguf", "--temp", 0)
    assert "other weight types beside it: model-Q8_0.gguf" in result.stderr


def test_json_has_everything(run: Run, models: Models, machine: Any) -> None:
    machine(FLAT, GOOD)
    result = run("accelerate", models.target, "--json")
    found = json.loads(result.stdout)
    assert {choice["temperature"] for choice in found["choices"]} == {0.0, 0.8}
    names = ["target", "profile", "choices", "measured", "left_out", "why", "curve"]
    assert list(found) == [*names, "sources", "interrupted", "seconds", "complete"]
    assert found["why"][0]["pays"]
    assert Path(found["profile"]).is_file()


def test_ctrl_c_keeps_what_is_known(run: Run, models: Models, machine: Any) -> None:
    machine(FLAT, GOOD).interrupt_at = 3
    result = run("accelerate", models.target, "--temp", 0)
    assert result.exit_code == 130
    assert "results are kept, and another call continues" in result.stderr
    assert "texts of all kinds, temperature 0: prompt-lookup" in result.stdout


def test_a_full_disk_is_a_sentence(
    run: Run, models: Models, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(FLAT, GOOD)

    def fail(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_sync_file", fail)
    result = run("accelerate", models.target)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the disk is full" in result.stderr


def why(run: Run, models: Models, *arguments: object) -> Any:
    asked = ("why", "-m", models.target, "-p", "abcabc", "-n", 16, "--seconds", 0.02)
    return run(*asked, "--repetitions", 1, "--temp", 0, *ENDLESS, *arguments)


def test_why_sets_expected_beside_measured(run: Run, models: Models) -> None:
    result = why(run, models, "-md", models.target, "--spec-draft-n-max", 3, "-v")
    assert result.exit_code == 0, result.stderr
    assert "Drafting with draft(" in "\n".join(result.stdout.splitlines()[:2])
    for text in ("times plain decoding", "expected", "target", "Python", "cost curve", "at best"):
        assert text in result.stdout
    found = json.loads(why(run, models, "--drafter", LOOKUP, "--json").stdout)
    assert found["drafter"] == LOOKUP
    assert {"expected", "speed_up", "best", "reasons", "pays"} <= set(found)


def test_why_looks_into_what_a_chat_would_draft_with(run: Run, models: Models) -> None:
    assert json.loads(why(run, models, "--json").stdout)["drafter"] == "auto"
    refused = why(run, models, "--drafter", "none")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "drafting is compared with plain decoding" in refused.stderr
