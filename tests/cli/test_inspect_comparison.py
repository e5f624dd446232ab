"""`specrun inspect A B` and `--batch-noise`: what quantizing and what drafting costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrun.convert.quantize import quantize_model
from specrun.convert.random_model import RandomLlama, write_random_llama

from .conftest import Run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    write_random_llama(
        folder / "a.gguf", RandomLlama(vocab_size=320, width=64, ffn=64, layers=1, context=512)
    )
    quantize_model(folder / "a.gguf", folder / "b.gguf", "Q4_0", n_threads=1)
    return folder / "a.gguf", folder / "b.gguf"


def test_figures_as_json(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a short text of some letters " * 20)
    result = run("inspect", *pair, "-f", tmp_path / "text.txt", "-c", 64, "-t", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["comparison"]
    assert found["n_ctx"] == 64
    summary = found["summary"]
    assert summary["n_tokens"] == found["n_chunks"] * 31
    assert 0 < summary["kl_median"] < summary["kl_99"] <= summary["kl_largest"]
    assert summary["original"]["value"] != summary["other"]["value"]
    errors = {error["name"]: error["relative_rms"] for error in found["tensor_errors"]}
    assert errors["output_norm.weight"] == 0
    assert 0.03 < errors["blk.0.ffn_up.weight"] < 0.2


def test_a_model_against_itself(run: Run, pair: tuple[Path, Path]) -> None:
    result = run("inspect", pair[0], pair[0], "-c", 64, "--chunks", 2, "-t", 1)
    assert result.exit_code == 0, result.output
    assert "62 tokens of the fixed text (2 chunks of 64)" in result.stdout
    assert "KL divergence, mean     0 +- 0 nats" in result.stdout
    assert "same first token        100.00 +- 0.00 %" in result.stdout
    assert "tensors have the same numbers" in result.stdout
    assert result.stderr == ""


def test_batch_noise_of_one_model(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a short text of some letters " * 20)
    line = ("inspect", pair[0], "--batch-noise", "-f", tmp_path / "text.txt", "-n", 32, "-t", 1)
    shown = run(*line, "-fa", "off", "-ctk", "f32", "-ctv", "f32")
    assert shown.exit_code == 0, shown.output
    assert "none in 30\n" in shown.stdout
    assert "fixed shape of 8: equal bits at 30 of 30 positions" in shown.stdout
    result = run(*line, "--json")
    assert result.exit_code == 0, result.output
    noise = json.loads(result.stdout)["batch_noise"]
    assert [width["width"] for width in noise["widths"]] == [2, 3, 4, 5, 8, 16]
    assert (noise["n_positions"], noise["fixed_shape"]["n_equal"]) == (32, 30)
    for more in ((pair[1],), ("-md", pair[1]), ("--sha256",)):
        refused = run(*line, *more)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "--batch-noise goes without" in refused.stderr
