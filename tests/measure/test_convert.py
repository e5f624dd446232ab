"""`measure convert` on small models: rows, budgets, memory; times are never asserted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import results_of
from support.commands import run_measure as run

from measure.convert.child import peak_memory, run_child
from measure.convert.made_model import write_checkpoint
from measure.convert.measurement import ConvertResult
from measure.tables import convert_table
from specrun.bench.timing import Ratio, spread_of
from specrun.bindings.errors import SpecrunError
from specrun.convert import convert_checkpoint


def rows(folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """Return the rows of a measurement, which leaves nothing behind in `folder`."""
    line = f"convert --only {name} -r 1 -t 1 --json --folder"
    found = results_of(run(line, folder, *more))
    assert not list(folder.iterdir())
    return found


def test_converting_stands_beside_a_copy(tmp_path: Path) -> None:
    copy, converted = rows(tmp_path, "checkpoint", "--size", "2M")
    assert (copy["name"], converted["name"]) == ("copy", "checkpoint to F16")
    assert converted["baseline"] == "copy"
    assert copy["n_bytes_in"] == converted["n_bytes_in"] >= 2_000_000
    assert 10 << 20 < converted["peak_bytes"] < 300 << 20
    assert converted["budget"] is None


def test_quantizing_stands_beside_llama_cpps_own_call(tmp_path: Path) -> None:
    direct, ours = rows(tmp_path, "quantize", "--size", "3M")
    assert (direct["name"], ours["name"]) == ("llama.cpp's API", "model to Q4_K_M")
    assert ours["baseline"] == "llama.cpp's API"
    assert direct["n_bytes_out"] == ours["n_bytes_out"] < ours["n_bytes_in"] == direct["n_bytes_in"]
    assert (ours["budget"], ours["peak_budget"]) == (0.9, round(1.2 * direct["peak_bytes"]))
    # Both its processes count: Python alone takes ten megabytes in each.
    assert ours["peak_bytes"] > 30e6


def test_the_cost_of_a_matrix_stands_beside_plain_evaluation(tmp_path: Path) -> None:
    plain, summed = rows(tmp_path, "imatrix", "--size", "1M")
    assert (plain["name"], summed["baseline"]) == ("plain evaluation", "plain evaluation")
    assert summed["n_bytes_out"] > 0
    assert "% over plain evaluation of 2 chunks of 512 tokens" in summed["note"]


def test_unknown_names_and_folders(tmp_path: Path) -> None:
    done = run("convert --only chekpoint")
    assert done.exit_code == 2
    assert "did you mean checkpoint" in done.stderr
    assert run("convert --folder", tmp_path / "none").exit_code == 3


def test_the_made_checkpoint_converts(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    n_bytes = write_checkpoint(tmp_path / "made", 1_000_000)
    report = convert_checkpoint(tmp_path / "made", tmp_path / "m.gguf")
    assert n_bytes == report.source_bytes == 2 * report.n_parameters >= 1_000_000


def result(share: float, peak: int) -> ConvertResult:
    times = spread_of([1.0])
    ratio = Ratio(share, share, share)
    return ConvertResult("x", 1, 1, times, times, "copy", ratio, 0.5, peak, 100)


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
