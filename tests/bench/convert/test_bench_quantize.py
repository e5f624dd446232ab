"""What `specrun bench convert` measures of quantizing, on small models; times are never
asserted."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from specrun.cli.main import cli


def rows(folder: Path, name: str, *more: str) -> list[dict[str, object]]:
    arguments = [
        "bench",
        "convert",
        "--only",
        name,
        "-r",
        "1",
        "-t",
        "1",
        "--folder",
        str(folder),
        "--json",
        *more,
    ]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert not list(folder.iterdir())
    found: list[dict[str, object]] = json.loads(done.stdout)["results"]
    return found


def test_quantizing_stands_beside_llama_cpps_own_call(tmp_path: Path) -> None:
    direct, ours = rows(tmp_path, "quantize", "--size", "3M")
    assert (direct["name"], ours["name"], ours["baseline"]) == (
        "llama.cpp's API",
        "model to Q4_K_M",
        "llama.cpp's API",
    )
    assert direct["n_bytes_out"] == ours["n_bytes_out"] < ours["n_bytes_in"] == direct["n_bytes_in"]
    assert (ours["budget"], ours["peak_budget"]) == (0.9, round(1.2 * direct["peak_bytes"]))
    # Both its processes count: Python alone takes ten megabytes in each.
    assert ours["peak_bytes"] > 30e6


def test_the_cost_of_a_matrix_stands_beside_plain_evaluation(tmp_path: Path) -> None:
    plain, summed = rows(tmp_path, "imatrix", "--size", "1M")
    assert (plain["name"], summed["baseline"]) == ("plain evaluation", "plain evaluation")
    assert summed["n_bytes_out"] > 0
    assert "% over plain evaluation of 2 chunks of 512 tokens" in summed["note"]
