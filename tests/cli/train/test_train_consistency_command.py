"""`specrun train consistency`: a new target, said loudly; wrong inputs in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_family import Family

from ..conftest import Run

SETTINGS = [
    *("--device", "cpu", "--precision", "float32", "--held-out", "0.3", "--batch-tokens", "400"),
    *("-lr", "0.005", "--block", "3", "--answer-length", "16", "--max-length", "64"),
]


def test_a_new_target_from_prompts_to_decoding(family: Family, run: Run, tmp_path: Path) -> None:
    inputs = ["--target", family.target, "--data", family.data, "-o", tmp_path / "out"]
    arguments = ["train", "consistency", *inputs, *SETTINGS, "--steps", 6]
    result = run(*arguments, "--gguf", tmp_path / "new.gguf", "--outtype", "f32")
    assert result.exit_code == 0, result.output
    assert "tokens per iteration" in result.stdout
    assert "of 9 held-out answers are the same as before" in result.stdout
    assert "Warning: this is a new model, not target: its text is its own" in result.stderr
    asked = ["-p", "What does second do?", "-n", "12", "--temp", "0", "--json"]
    jacobi = ["--drafter", "jacobi(n=3, until=8, always=yes)"]
    found, plain = (
        json.loads(run("generate", "-m", tmp_path / "new.gguf", *asked, *more).stdout)
        for more in (jacobi, [])
    )
    assert found["token_ids"] == plain["token_ids"]
    assert found["stats"]["drafted"] > 0
    again = run(*arguments)
    assert again.exit_code == 2
    assert "already holds model.safetensors" in again.stderr
    facts = json.loads(run(*arguments, "--force", "--json").stdout)
    assert facts["kind"] == "new target"
    assert facts["tokens_per_iteration_before"] >= 1.0
    assert facts["decoded"] == 9


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ([], 2, "--target"),
        (["--target", "nowhere", "--data", __file__], 3, "nowhere"),
        (["--target", ".", "--data", __file__, "--form", "both"], 2, "--form"),
        (["--target", ".", "--data", __file__, "--block", "0"], 2, "--block"),
    ],
)
def test_wrong_inputs(
    run: Run, tmp_path: Path, arguments: list[object], code: int, named: str
) -> None:
    result = run("train", "consistency", *arguments, "-o", tmp_path / "out")
    assert result.exit_code == code
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
