"""`specrun calibrate`: what is measured, where it is kept, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from support.commands import run
from support.tiny_heads import random_medusa

from specrun.runtime.heads import HeadFile, read_accuracy_csv, stored_accuracy

from .conftest import Models

pytestmark = pytest.mark.usefixtures("own_cache")

FAST = ("-t", "1", "-c", "256", "-n", "40", "--ranks", "30", "--seconds", "0")
HIDDEN, VOCAB = 32, 320


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return random_medusa(HIDDEN, VOCAB).write(tmp_path / "heads.gguf", VOCAB)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(
        "Many words, of which some come again: many words, of which some come again. " * 8
    )
    return path


def calibrate(models: Models, heads: Path, *more: str | Path) -> Result:
    return run("calibrate", "-m", models.target, "-md", heads, *FAST, *more)


def test_a_texts_accuracies_go_into_the_heads_file(models: Models, heads: Path, text: Path) -> None:
    result = calibrate(models, heads, "-f", text, "-n", "300")
    assert result.exit_code == 0, result.output
    assert "Right, if the guesses before were right:" in result.stdout
    assert "Right, at all positions:" in result.stdout
    assert "for the typical costs" in result.stdout
    assert f"kept in {heads}" in result.stderr
    accuracy = stored_accuracy(HeadFile(heads, "medusa"), 3)
    assert accuracy is not None
    assert len(accuracy) == 3
    assert sum(accuracy[0]) > 0.0
    drafter = ("--drafter", f"medusa({heads})")
    drafted = run("generate -t 1 -c 256 -p a -n 4 -m", models.target, *drafter)
    assert drafted.exit_code == 0, drafted.output


def test_what_the_target_writes_is_measured_with_its_costs(models: Models, heads: Path) -> None:
    result = calibrate(
        models, heads, "-p", "abc", "-p", "xyz", "--seconds", "0.05", "--json", "--no-save"
    )
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["costs"] == "measured"
    assert 0 < content["positions"] <= 40
    assert (len(content["accuracy"]), len(content["accuracy"][0])) == (3, 30)
    assert content["plan"] is None or content["plan"]["nodes"] >= 1
    assert stored_accuracy(HeadFile(heads, "medusa"), 3) is None
    assert "kept" not in result.stderr


def test_a_csv_leaves_the_heads_file_alone(
    models: Models, heads: Path, text: Path, tmp_path: Path
) -> None:
    before, table = heads.read_bytes(), tmp_path / "accuracy.csv"
    assert calibrate(models, heads, "-f", text, "-o", table).exit_code == 0
    assert heads.read_bytes() == before
    assert len(read_accuracy_csv(table, 3)) == 3
    again = calibrate(models, heads, "-f", text, "-o", table)
    assert (again.exit_code, "already exists" in again.output) == (2, True)
    assert calibrate(models, heads, "-f", text, "-o", table, "--force").exit_code == 0


def test_a_bad_csv_ends_with_its_line(models: Models, heads: Path, tmp_path: Path) -> None:
    table = tmp_path / "bad.csv"
    table.write_text("head,rank,accuracy\n0,0,0.5\n0,1,1.5\n")
    drafter = f'medusa("{heads}", accuracy="{table}")'
    result = run(
        "generate", "-m", models.target, "--drafter", drafter, "-p", "a", "-n", "4", "-t", "1"
    )
    assert result.exit_code == 3
    assert "bad.csv, line 3: accuracy is '1.5'" in result.output


def test_a_rule_that_is_not_exact_is_announced_once(models: Models) -> None:
    asked = "generate --drafter prompt-lookup -p abab -n 8 -t 1 -c 256 -m"
    result = run(asked, models.plain, "--accept", "typical(eps=0.2)")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("not exact: typical(eps=0.2, delta=0.3): the text") == 1
    said = r"typical\(eps=0.2, delta=0.3\), TV [0-9.]+ from the target's distribution, [0-9.]+%"
    assert re.search(said + " of tokens changed", result.stderr)
    told = json.loads(run(asked, models.plain, "--accept", "typical", "--json").stdout)
    assert told["stats"]["exact"] is False
    assert "not exact" not in run(asked, models.plain).stderr
    bad = run(asked, models.plain, "--accept", "typical(eps=2)")
    assert (bad.exit_code, "eps is 2" in bad.output) == (2, True)
    assert "not exact: typical, cascade-chow" in " ".join(run("generate", "--help").stdout.split())
