"""`specrun bench convert` on a small checkpoint: rows, memory, and nothing left; times are never
asserted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from specrun.bench.convert.child import peak_memory, run_child
from specrun.bench.convert.made_model import write_checkpoint
from specrun.bench.convert.measurement import ConvertResult
from specrun.bench.report import convert_table
from specrun.bench.timing import Ratio, spread_of
from specrun.bindings.errors import SpecrunError
from specrun.cli.main import cli
from specrun.convert import convert_checkpoint


def test_rows_and_nothing_left(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli,
        [
            "bench",
            "convert",
            "--only",
            "checkpoint",
            "--size",
            "2M",
            "-r",
            "1",
            "--folder",
            str(tmp_path),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    copy, converted = json.loads(done.stdout)["results"]
    assert (copy["name"], converted["name"], converted["baseline"]) == (
        "copy",
        "checkpoint to F16",
        "copy",
    )
    assert copy["n_bytes_in"] == converted["n_bytes_in"] >= 2_000_000
    assert 10 << 20 < converted["peak_bytes"] < 300 << 20
    assert converted["budget"] is None
    assert not list(tmp_path.iterdir())


def test_unknown_names_and_folders(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", "convert", "--only", "chekpoint"])
    assert done.exit_code == 2
    assert "did you mean checkpoint" in done.stderr
    assert (
        CliRunner().invoke(cli, ["bench", "convert", "--folder", str(tmp_path / "none")]).exit_code
        == 3
    )


def test_the_made_checkpoint_converts(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    n_bytes = write_checkpoint(tmp_path / "made", 1_000_000)
    report = convert_checkpoint(tmp_path / "made", tmp_path / "m.gguf")
    assert n_bytes == report.source_bytes == 2 * report.n_parameters >= 1_000_000


def result(share: float, peak: int) -> ConvertResult:
    times = spread_of([1.0])
    return ConvertResult(
        "x", 1, 1, times, times, "copy", Ratio(share, share, share), 0.5, peak, 100
    )


def test_budgets() -> None:
    assert result(0.5, 100).within_budget is True
    assert result(0.49, 100).within_budget is False
    assert result(0.9, 101).within_budget is False
    shown = [row[-1].split(": ")[1] for row in convert_table([result(0.5, 1), result(0.1, 1)]).rows]
    assert shown == ["within", "over"]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory as Linux counts it"
)
def test_the_memory_of_a_child_is_its_own(tmp_path: Path) -> None:
    held = bytearray(os.urandom(1 << 20) * 200)  # what the parent holds must not count
    assert peak_memory() > len(held)
    (tmp_path / "made").mkdir()
    write_checkpoint(tmp_path / "made", 1_000_000)
    run = run_child("convert", str(tmp_path / "made"), str(tmp_path / "m.gguf"))
    assert run.peak_bytes < len(held)


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(SpecrunError, match="there is no folder"):
        run_child("convert", str(tmp_path / "none"), str(tmp_path / "m.gguf"))
