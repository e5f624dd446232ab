"""`specrun datastore`, drafting from a store and from a reference, as a user meets them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.commands import started

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def store(run, models, corpus: Path) -> Path:
    path = corpus.with_name("a.store")
    done = run("datastore", "build", corpus, "-m", models.target, "-o", path)
    assert done.exit_code == 0, done.output
    assert "draft with --drafter" in done.stderr
    assert done.stdout == ""
    return path


def test_info_as_text_and_json(run, models, store: Path):
    shown = run("datastore", "info", store, "-m", models.target)
    assert shown.exit_code == 0, shown.output
    assert "undamaged" in shown.stdout
    assert "fits" in shown.stdout
    values = json.loads(run("datastore", "info", store, "--json").stdout)
    assert values["n_text_bytes"] == len(TEXT)
    assert values["model"] == models.target.name


def test_drafting_from_a_store_and_a_reference_keeps_the_text(
    run, models, store: Path, corpus: Path
):
    common = ("generate -n 24 --temp 0.8 -s 3 --json -m", models.target, "-p", "the quick")
    plain = json.loads(run(*common).stdout)
    for extra in (
        ("--drafter", f'rest("{store}", min_match=1)'),
        ("--reference", corpus),
        ("--drafter", "prompt-lookup(min_ngram=1)", "--reference", corpus),
    ):
        drafted = run(*common, *extra)
        assert drafted.exit_code == 0, drafted.output
        assert json.loads(drafted.stdout)["token_ids"] == plain["token_ids"]
        assert json.loads(drafted.stdout)["stats"]["drafter"].startswith(("rest", "prompt-lookup"))


def test_a_damaged_store_is_seen_by_info(run, store: Path):
    data = bytearray(store.read_bytes())
    data[-1] ^= 1
    store.write_bytes(data)
    result = run("datastore", "info", store)
    assert result.exit_code == 3
    assert "damaged" in result.stderr


def test_ctrl_c_in_a_real_process_leaves_nothing(models, tmp_path: Path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT * 20_000, encoding="utf-8")  # 18 MB: seconds of work
    files = (corpus, "-m", models.target, "-o", tmp_path / "out.store")
    with started("datastore build", *files) as child:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert errors.splitlines()[-1] == b"Error: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]
