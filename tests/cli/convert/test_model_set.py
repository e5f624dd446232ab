"""`specrun convert TARGET --with DRAFTER -o FOLDER`, and then `-m FOLDER`, as users run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.saved_dflash import save_published
from support.tiny_checkpoints import save_checkpoint
from support.tiny_dflash import TinyDFlash

from specrun.runtime.models import read_set

from ..conftest import Run


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "Tiny-Llama")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    tiny = TinyDFlash(vocab_size=300, taps=(0, 1))
    return save_published(tmp_path / "Tiny-DFlash", tiny, "z-lab")


def test_a_set_runs_by_its_folder(run: Run, target: Path, drafter: Path, tmp_path: Path) -> None:
    small, place = save_checkpoint(tmp_path / "Tiny-Other"), tmp_path / "set"
    command = ("convert", target, "--with", drafter, "--with", small, "-o", place, "--no-verify")
    planned = run(*command, "--dry-run", "--json")
    assert len(json.loads(planned.stdout)["files"]) == 3
    assert not place.exists()
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert f"specrun chat -m {place}" in result.stdout
    names = {path.name for path in place.iterdir()}
    models = {"Tiny-Llama-35K-F16.gguf", "Tiny-Other-35K-F16.gguf"}
    assert names == {"dflash-Tiny-DFlash-Q8_0.gguf", "specrun.json", *models}
    made = read_set(place)
    assert [method for method, _ in made.drafters] == ["dflash", "draft"]
    assert made.drafter.startswith('auto(dflash("')
    asked = ("-p", "hello", "-n", 8, "--temp", 0, "-t", 1, "--json")
    plain = run("generate", "-m", made.model, *asked, "--drafter", "none")
    by_set = run("generate", "-m", place, *asked)
    assert by_set.exit_code == 0, by_set.output
    told = json.loads(by_set.stdout)
    assert told["text"] == json.loads(plain.stdout)["text"]
    assert told["stats"]["drafter"].startswith("auto(dflash("), told
    again = run(*command)
    assert again.exit_code == 2
    assert "--force" in again.stderr
    as_draft = run("generate", "-m", made.model, "-md", place, *asked)
    assert as_draft.exit_code == 2
    assert "is a set of models" in as_draft.stderr


def test_a_file_stays_where_it_is(run: Run, target: Path, drafter: Path, tmp_path: Path) -> None:
    file, place = tmp_path / "model.gguf", tmp_path / "set"
    assert run("convert", target, "-o", file, "--no-verify").exit_code == 0
    result = run("convert", file, "--with", drafter, "-o", place, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert [each["architecture"] for each in facts["files"]] == ["dflash"]
    assert read_set(place).model == file
    drafted = run("generate", "-m", place, "-p", "hello", "-n", 4, "-t", 1, "--json")
    assert json.loads(drafted.stdout)["stats"]["drafter"].startswith("dflash("), drafted.output


def test_what_a_set_cannot_be(run: Run, target: Path, drafter: Path, tmp_path: Path) -> None:
    place = tmp_path / "set"
    command = ("convert", target, "--with", drafter)
    for more, words in (
        ((), "-o FOLDER"),
        (("-o", place, "--kind", "dflash"), "leave out --target"),
        (("-o", target / "config.json"), "is a file; name the folder"),
        (("-o", place, "--with", drafter), "two files of the set"),
    ):
        result = run(*command, *more)
        assert result.exit_code == 2, result.output
        assert words in result.stderr, result.stderr
    place.mkdir()
    (place / "specrun.json").write_text('{"model": 1, "drafters": [{"method": "x", "file": "y"}]}')
    result = run("generate", "-m", place, "-p", "a")
    assert result.exit_code == 3, result.output
    assert "names x drafter" in result.stderr
