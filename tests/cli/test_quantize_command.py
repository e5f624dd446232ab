"""`specrun quantize` and `specrun imatrix` as users type them: names, tables, exit codes, nothing
left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrun.bindings.gguf import read_header
from specrun.bindings.quantizer import FILE_TYPES
from specrun.cli.quantize import default_output
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.convert.random_model import RandomLlama, write_random_llama

TEXT = "all work and no play makes a model dull. " * 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_llama(
        tmp_path / "wide-F32.gguf", RandomLlama(width=256, ffn=256, layers=1, vocab_size=320)
    )
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "file_type", "expected"),
    [
        ("model-F16.gguf", "Q4_K_M", "model-Q4_K_M.gguf"),
        ("Big-8B-Q8_0.gguf", "IQ2_XXS", "Big-8B-IQ2_XXS.gguf"),
        ("model.bf16.gguf", "Q4_0", "model.q4_0.gguf"),
        ("a-Q4_K_M-v2.gguf", "Q6_K", "a-Q6_K-v2.gguf"),
        ("target.gguf", "Q8_0", "target-Q8_0.gguf"),
        ("F16.gguf", "Q8_0", "F16-Q8_0.gguf"),
        ("a-F16x.gguf", "Q8_0", "a-F16x-Q8_0.gguf"),
        ("no suffix", "Q8_0", "no suffix-Q8_0.gguf"),
    ],
)
def test_the_default_name_swaps_the_encoding(source: str, file_type: str, expected: str) -> None:
    assert default_output(Path("/models") / source, file_type) == Path("/models") / expected


def test_a_table_says_what_was_written(run, folder: Path) -> None:
    result = run("quantize", folder / "wide-F32.gguf", "q4_k")
    assert result.exit_code == 0, result.output
    assert read_header(folder / "wide-Q4_K_M.gguf").file_type_name == "Q4_K_M"
    lines = result.stdout.splitlines()
    assert lines[0].endswith("wide-Q4_K_M.gguf: Q4_K_M:")
    assert [line.split()[0] for line in lines[1:]] == ["type", "Q4_K", "Q6_K", "F32", "in"]
    assert "became" in result.stderr


def test_json_has_the_same(run, folder: Path) -> None:
    result = run(
        "quantize", folder / "wide-F32.gguf", folder / "small.gguf", "Q8_0", "--json", "-q"
    )
    said = json.loads(result.stdout)
    assert (said["file_type"], said["output"]) == ("Q8_0", str(folder / "small.gguf"))
    assert {kind["type"]: kind["tensors"] for kind in said["types"]} == {"Q8_0": 9, "F32": 3}
    assert said["n_bytes"] == (folder / "small.gguf").stat().st_size


def test_help_lists_every_type_with_its_bits(run) -> None:
    words = run("quantize", "--help").output.replace("*", "").split()
    for name, kind in FILE_TYPES.items():
        assert words[words.index(name) + 1] == f"{kind.bits_per_weight:.2f}"


def test_a_matrix_is_made_resumed_and_used(run, folder: Path) -> None:
    model, matrix = folder / "wide-F32.gguf", folder / "m.gguf"
    base = ("imatrix -c 64 -m", model, "-f", folder / "text.txt", "-o", matrix)
    result = run(*base, "--chunks", 2, "--json")
    assert result.exit_code == 0, result.output
    assert (json.loads(result.stdout)["chunks"], json.loads(result.stdout)["entries"]) == (2, 7)
    assert run(*base).exit_code == 2  # it exists
    result = run(*base, "--resume", "--json")
    assert json.loads(result.stdout)["chunks_now"] == json.loads(result.stdout)["chunks"] - 2
    result = run("quantize --pure -v --imatrix", matrix, model, "IQ3_XXS")
    assert result.exit_code == 0, result.output
    assert read_header(folder / "wide-IQ3_XXS.gguf").tensor_type_counts["IQ3_XXS"] == 9
    both = ("--in-file", matrix, "--in-file", matrix)
    result = run("imatrix", *both, "-o", folder / "two.gguf")
    assert result.exit_code == 0, result.output


def test_heads_need_no_type(run, tmp_path: Path) -> None:
    import numpy as np

    rows = np.ones((4, 64), np.float16)
    planned = [PlannedTensor("medusa.0.res.weight", (4, 64), "F16", lambda: rows)]
    write_gguf(tmp_path / "heads-F16.gguf", "medusa", Metadata(), planned)
    for arguments in (
        ["heads-F16.gguf"],
        ["heads-F16.gguf", "other.gguf"],
        ["heads-F16.gguf", "x.gguf", "q4_0"],
    ):
        files = (tmp_path / each if each.endswith("gguf") else each for each in arguments)
        result = run("quantize", *files)
        assert result.exit_code == 0, result.output
    assert read_header(tmp_path / "heads-Q8_0.gguf").tensor_type_counts == {"Q8_0": 1}
    assert read_header(tmp_path / "x.gguf").tensor_type_counts == {"Q4_0": 1}
    result = run("quantize", tmp_path / "heads-F16.gguf", "Q4_1", "--imatrix", tmp_path / "x.gguf")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: there are no importance matrices for heads: leave out --imatrix\n",
    )
