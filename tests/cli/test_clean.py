"""`specrun clean` lists and removes what specrun keeps, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import run


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("cache", "state", "config"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    monkeypatch.setenv("SPECRUN_CONFIG", str(tmp_path / "config.toml"))
    for path, size in (
        ("cache/specrun/wheels/a/b.whl", 2000),
        ("cache/specrun/profiles/m.json", 10),
        ("cache/specrun/of-another-version/x", 1),
        ("cache/other/file", 5),
        ("state/specrun/history", 30),
        ("state/specrun/learn/m/buffer", 400),
        ("config.toml", 0),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"#" * size)
    return tmp_path


def left(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)) for path in files}


def test_everything_is_listed_with_its_size_and_stays(kept: Path) -> None:
    before = left(kept)
    facts = json.loads(run("clean --json").stdout)
    sizes = {each["name"]: (each["files"], each["bytes"], each["cache"]) for each in facts}
    assert sizes == {
        "wheels": (1, 2000, True),
        "profiles": (1, 10, True),
        "of-another-version": (1, 1, True),
        "history": (1, 30, False),
        "learn": (1, 400, False),
        "config": (1, 0, False),
    }
    shown = run("clean").stdout
    assert "llama.cpp as it was built" in shown
    assert "1.95 KiB" in shown
    assert left(kept) == before


def test_named_parts_are_removed_alone(kept: Path) -> None:
    before = left(kept)
    done = run("clean wheels history")
    assert "removed" in done.stderr
    assert before - left(kept) == {"cache/specrun/wheels/a/b.whl", "state/specrun/history"}


def test_cache_and_all(kept: Path) -> None:
    run("clean --cache")
    own = {"cache/other/file", "state/specrun/history", "state/specrun/learn/m/buffer"}
    assert left(kept) == {*own, "config.toml"}
    run("clean --all")
    assert left(kept) == {"cache/other/file"}
    assert "nothing to remove" in run("clean --all").stderr
    assert "Nothing is kept." in run("clean").stderr


def test_an_unknown_name_removes_nothing(kept: Path) -> None:
    before = left(kept)
    refused = run("clean wheels wheel")
    assert refused.exit_code == 2
    assert "'wheel' is not kept: there is config, history" in refused.stderr
    assert left(kept) == before


def test_a_link_is_removed_and_not_its_target(kept: Path) -> None:
    (kept / "cache/specrun/cuts").symlink_to(kept / "cache/other")
    run("clean cuts")
    assert "cache/other/file" in left(kept)
    assert not (kept / "cache/specrun/cuts").exists()
