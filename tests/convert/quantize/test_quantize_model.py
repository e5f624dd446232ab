"""Quantized files have the chosen types, stay close to the source, and are refused if they
would not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    ModelError,
    OptionError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.quantizer import QuantizerProcess
from specrun.convert import RandomLlama, quantize_model, write_random_llama
from specrun.convert.gguf import Metadata, write_gguf

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
WIDE = RandomLlama(width=256, ffn=256, layers=1, scale=2.0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "wide.gguf"
    write_random_llama(path, WIDE)
    return path


# How far logits of spread 2 may move: a little above the measured error of each type.
@pytest.mark.parametrize(
    ("file_type", "matrix_type", "tolerance"),
    [
        ("F32", "F32", 1e-5),
        ("F16", "F16", 0.02),
        ("BF16", "BF16", 0.1),
        ("Q8_0", "Q8_0", 0.1),
        ("q6_k", "Q6_K", 0.4),
        ("Q4_K_M", "Q4_K", 1.2),
        ("q2_K", "Q2_K", 5.0),
    ],
)
def test_a_type_of_every_kind(tmp_path, source, logits, file_type, matrix_type, tolerance) -> None:
    report = quantize_model(source, tmp_path / "m.gguf", file_type, n_threads=1)
    header = read_header(report.output)
    assert header.file_type_name == report.file_type == file_type.upper()
    assert header.tensor_type_counts == report.tensor_types
    assert report.tensor_types[matrix_type] >= 2
    assert (report.n_parameters, report.n_substituted) == (read_header(source).n_parameters, 0)
    assert report.n_bytes == (tmp_path / "m.gguf").stat().st_size
    moved = np.abs(logits(report.output, TOKENS) - logits(source, TOKENS)).max()
    assert moved < tolerance
    assert moved > tolerance / 1000 or file_type == "F32"
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_smaller_types_are_smaller(tmp_path: Path, source: Path) -> None:
    whole, half, fewest = (
        quantize_model(source, tmp_path / name, name, n_threads=1).bits_per_weight
        for name in ("F32", "F16", "Q2_K")
    )
    assert whole == pytest.approx(32.0)
    assert whole > half > fewest


def test_pure_gives_every_matrix_one_type(tmp_path: Path, source: Path) -> None:
    mixed = quantize_model(source, tmp_path / "mixed", "Q4_K_M", n_threads=1)
    pure = quantize_model(source, tmp_path / "pure", "Q4_K_M", n_threads=1, pure=True)
    assert set(mixed.tensor_types) == {"F32", "Q4_K", "Q6_K"}
    assert set(pure.tensor_types) == {"F32", "Q4_K"}


def test_rows_that_k_types_cannot_hold_are_counted(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "narrow", RandomLlama(width=32, ffn=64, layers=1))
    report = quantize_model(tmp_path / "narrow", tmp_path / "m", "Q4_K_M", n_threads=1)
    assert report.n_substituted == 9  # all of them
    assert "Q4_K" not in report.tensor_types
    assert (
        quantize_model(tmp_path / "narrow", tmp_path / "n", "Q8_0", n_threads=1).n_substituted == 0
    )


def test_rows_that_no_type_can_hold_are_refused(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "odd", RandomLlama(width=24, heads=2, kv_heads=1, layers=1))
    with pytest.raises(OptionError, match="rows of 24 numbers, not a multiple of 32"):
        quantize_model(tmp_path / "odd", tmp_path / "m", "Q8_0")
    assert (
        quantize_model(tmp_path / "odd", tmp_path / "m", "F16", n_threads=1).tensor_types["F16"]
        == 9
    )


def test_quantizing_again_must_be_allowed(tmp_path: Path, source: Path) -> None:
    quantize_model(source, tmp_path / "q8", "Q8_0", n_threads=1)
    with pytest.raises(OptionError, match=r"quantized already \(Q8_0\).*--allow-requantize"):
        quantize_model(tmp_path / "q8", tmp_path / "q4", "Q4_0")
    assert not (tmp_path / "q4").exists()
    report = quantize_model(
        tmp_path / "q8", tmp_path / "q4", "Q4_0", n_threads=1, allow_requantize=True
    )
    assert report.tensor_types["Q4_0"] >= 2


@pytest.mark.parametrize(
    ("asked", "hint"),
    [("Q4_KM", "did you mean Q4_K_M"), ("q8", "did you mean Q8_0"), ("", "use one of F32")],
)
def test_unknown_types_name_the_nearest(
    tmp_path: Path, source: Path, asked: str, hint: str
) -> None:
    with pytest.raises(OptionError, match=hint):
        quantize_model(source, tmp_path / "m", asked)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path, source: Path) -> None:
    (tmp_path / "m").write_bytes(b"precious")
    with pytest.raises(OptionError, match=r"already exists.*--force"):
        quantize_model(source, tmp_path / "m", "Q8_0")
    assert (tmp_path / "m").read_bytes() == b"precious"
    assert (
        quantize_model(source, tmp_path / "m", "Q8_0", force=True, n_threads=1).output
        == tmp_path / "m"
    )


def test_a_file_may_replace_itself(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "m", WIDE)
    quantize_model(tmp_path / "m", tmp_path / "m", "Q8_0", force=True, n_threads=1)
    assert read_header(tmp_path / "m").file_type_name == "Q8_0"


def test_missing_damaged_and_split_sources(tmp_path: Path, source: Path) -> None:
    with pytest.raises(FileMissingError, match="there is no file"):
        quantize_model(tmp_path / "none", tmp_path / "m", "Q8_0")
    (tmp_path / "cut").write_bytes(source.read_bytes()[:-100])
    with pytest.raises(MalformedFileError, match="truncated"):
        quantize_model(tmp_path / "cut", tmp_path / "m", "Q8_0")
    part = Metadata()
    part.count("split.count", 2)
    write_gguf(tmp_path / "part", "llama", part, [])
    with pytest.raises(UnsupportedModelError, match="one part of a split model"):
        quantize_model(tmp_path / "part", tmp_path / "m", "Q8_0")
    assert not (tmp_path / "m").exists()


def test_what_llama_cpp_refuses_is_a_named_error_with_nothing_left(tmp_path: Path) -> None:
    other = Metadata()
    other.count("nonsense.block_count", 1)
    write_gguf(tmp_path / "other", "nonsense", other, [])
    with pytest.raises(ModelError, match=r"llama.cpp cannot quantize .*other to Q8_0: ."):
        quantize_model(tmp_path / "other", tmp_path / "m", "Q8_0", n_threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_an_interrupted_quantization_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch
) -> None:
    def interrupt(_process: QuantizerProcess, aside: Path) -> None:
        aside.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(QuantizerProcess, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, tmp_path / "m", "Q8_0")
    assert not list(tmp_path.iterdir())
