"""`specrun train drafter`: from two folders and a text to a drafter that drafts; wrong inputs in
one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_family import Family

from specrun.bindings.gguf import read_header
from specrun.convert import convert_checkpoint

from ..conftest import Models, Run

SETTINGS = [
    *("--device", "cpu", "--precision", "float32", "--held-out", "0.3"),
    *("--batch-tokens", "400", "-lr", "0.01"),
]


def arguments(family: Family, output: Path, *more: object) -> list[object]:
    inputs = ["--target", family.target, "--draft", family.draft, "--data", family.data]
    return ["train", "drafter", *inputs, "-o", output, *SETTINGS, *more]


def test_a_drafter_from_data_to_drafting(family: Family, run: Run, tmp_path: Path) -> None:
    output, gguf = tmp_path / "out", tmp_path / "drafter.gguf"
    plot = tmp_path / "curves.svg"
    more = ["--steps", "30", "--gguf", gguf, "--outtype", "f32", "--plot", plot]
    result = run(*arguments(family, output, *more))
    assert result.exit_code == 0, result.output
    assert "before: alpha 0." in result.stderr
    assert "memory: about" in result.stderr
    for shown in ("alpha", "before", "after", "gain of alpha", str(output), str(gguf), str(plot)):
        assert shown in result.stdout
    assert "<svg" in plot.read_text()
    assert "# draft, a drafter for target" in (output / "README.md").read_text()
    assert read_header(gguf).architecture == "llama"
    convert_checkpoint(family.target, tmp_path / "target.gguf", outtype="f32")
    asked = ["-p", "What does second do?", "-n", "12", "--temp", "0", "--json"]
    drafted = run("generate", "-m", tmp_path / "target.gguf", "-md", gguf, *asked)
    assert drafted.exit_code == 0, drafted.output
    assert json.loads(drafted.stdout)["stats"]["acceptance_rate"] > 0.3


def test_json_is_one_object(family: Family, run: Run, tmp_path: Path) -> None:
    more = ["--steps", "12", "--on-policy", "0.5", "--divergence", "jensen-shannon"]
    more += ["--longest-answer", "12", "--json"]
    result = run(*arguments(family, tmp_path / "out", *more))
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["steps"] == 12
    assert facts["alpha_gain"]["gain"] == pytest.approx(
        facts["alpha_after"]["rate"] - facts["alpha_before"]["rate"]
    )
    assert facts["alpha_gain"]["gain"] > 0.02
    assert (facts["alpha_before"]["texts"], facts["measured_on_training"]) == (9, False)


def test_a_second_drafter_beside_a_first(family: Family, run: Run, tmp_path: Path) -> None:
    convert_checkpoint(family.draft, tmp_path / "first.gguf", outtype="f32")
    more = ["--steps", "10", "--not-covered-by", tmp_path / "first.gguf", "--measure-on", "given"]
    result = run(*arguments(family, tmp_path / "out", *more))
    assert result.exit_code == 0, result.output
    assert "first tokens known together" in result.stdout


def test_other_vocabularies(family: Family, models: Models, run: Run, tmp_path: Path) -> None:
    more = ["--not-covered-by", models.target]
    result = run(*arguments(family, tmp_path / "out", *more))
    assert (result.exit_code, result.stdout) == (4, "")
    assert "cannot draft for" in result.stderr
    assert " is " in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "code", "problem"),
    [
        ({"--target": "nowhere"}, 3, "there is no folder nowhere"),
        ({"--draft": "nowhere"}, 3, "there is no folder nowhere"),
        ({"--data": "nothing.jsonl"}, 3, "nothing.jsonl"),
        ({"--data": "empty.txt"}, 3, "empty.txt has no usable text"),
        ({"--on-policy": "2"}, 2, "2"),
        ({"--divergence": "hellinger"}, 2, "hellinger"),
        ({"--law-temp": "0"}, 2, "0"),
        ({"--plot": "curves.doc"}, 2, "curves.doc"),
        ({"--gguf": "nowhere/x.gguf"}, 3, "there is no folder nowhere"),
    ],
)
def test_wrong_inputs(
    family: Family, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str], code: int, problem: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    inputs = {"--target": family.target, "--draft": family.draft, "--data": family.data}
    given = {**inputs, "-o": "out", **changes}
    result = run("train", "drafter", *(part for pair in given.items() for part in pair), *SETTINGS)
    assert result.exit_code == code, result.output
    assert problem in result.stderr
    assert result.stderr.count("\n") <= 6
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out" / "model.safetensors").exists()
