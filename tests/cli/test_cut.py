"""`specrun cut`: files that can draft, marks that inspect shows, and nothing left behind where it
fails."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specrun.bindings.gguf import read_header
from specrun.convert import RandomLlama, write_random_llama

from .conftest import ENDLESS, Models, Run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_cut_drafts_for_its_own_model(models: Models, run: Run, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    result = run("cut", models.target, cut, "--skip-layers", "2")
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert "layers 0-1,3 of 4" in result.stderr
    command = ["generate -p abc -n 24 --temp 0 --json -m", models.target, *ENDLESS]
    plain = json.loads(run(*command).stdout)
    drafted = json.loads(run(*command, "--drafter", f'draft("{cut}", n=4, p_min=adaptive)').stdout)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["drafted"] > 0


def test_inspect_shows_both_marks(models: Models, run: Run, tmp_path: Path) -> None:
    assert run("cut", models.target, tmp_path / "cut.gguf", "--layers", "0,2-").exit_code == 0
    assert (
        run("cut", tmp_path / "cut.gguf", tmp_path / "padded.gguf", "--pad-to", "1M").exit_code == 0
    )
    shown = run("inspect", tmp_path / "padded.gguf")
    assert "layers 0, 2, 3 of the 4 of target.gguf" in shown.stdout
    assert "cut.gguf, widened" in shown.stdout
    facts = json.loads(run("inspect", tmp_path / "padded.gguf", "--json").stdout)
    assert facts["cut_layers"] == [0, 2, 3]
    assert 0.9e6 < facts["parameters"] < 1.1e6
    assert facts["padded_parameters"] > 0.9e6
    plain = json.loads(run("inspect", models.target, "--json").stdout)
    assert (plain["cut_layers"], plain["padded_parameters"]) == (None, None)


def test_json_says_what_was_written(models: Models, run: Run, tmp_path: Path) -> None:
    result = run("cut", models.target, tmp_path / "cut.gguf", "--layers", "0", "--json")
    facts = json.loads(result.stdout)
    assert (facts["layers"], facts["source_layers"]) == ([0], 4)
    assert facts["bytes"] == (tmp_path / "cut.gguf").stat().st_size


@pytest.mark.parametrize(
    ("number", "code", "problem"),
    [
        (errno.ENOSPC, 1, "the disk is full"),
        (errno.EROFS, 1, "cannot be written"),
    ],
)
def test_a_full_disk_and_a_read_only_folder(
    models: Models,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    problem: str,
) -> None:
    original = os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_RDWR or flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return original(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    result = run("cut", models.target, tmp_path / "cut.gguf", "--layers", "0")
    assert result.exit_code == code, result.output
    assert problem in result.stderr
    assert names(tmp_path) == []


def test_too_little_room_is_seen_before_anything_is_written(
    models: Models, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: _Usage())
    result = run("cut", models.target, tmp_path / "cut.gguf", "--layers", "0")
    assert result.exit_code == 1
    assert "free some space" in result.stderr
    assert names(tmp_path) == []


class _Usage:
    free = 10


KILLED = """
import sys, time
from specrun.convert import cut_layers

def slowly(done, total):
    print(done, flush=True)
    time.sleep(30)

cut_layers(sys.argv[1], sys.argv[2], layers="0-1", force=True, progress=slowly)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="only Linux has files without a name")
@pytest.mark.parametrize("before", [None, b"the file that was there"])
def test_kill_9_while_writing_leaves_nothing_or_the_whole_file(
    tmp_path: Path, before: bytes | None
) -> None:
    source, folder = tmp_path / "whole.gguf", tmp_path / "out"
    write_random_llama(source, RandomLlama())
    folder.mkdir()
    if before is not None:
        (folder / "cut.gguf").write_bytes(before)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, source, folder / "cut.gguf"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0  # a part is written
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    assert names(folder) == ([] if before is None else ["cut.gguf"])
    assert before is None or (folder / "cut.gguf").read_bytes() == before


def test_ctrl_c_while_writing_leaves_nothing(tmp_path: Path) -> None:
    from specrun.convert import cut_layers

    write_random_llama(tmp_path / "whole.gguf", RandomLlama())

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_layers(tmp_path / "whole.gguf", tmp_path / "cut.gguf", layers="0", progress=interrupt)
    assert names(tmp_path) == ["whole.gguf"]
    cut_layers(tmp_path / "whole.gguf", tmp_path / "cut.gguf", layers="0")
    assert read_header(tmp_path / "cut.gguf").metadata["llama.block_count"] == 1
