"""Heads: matrices in the chosen type, norms in F32, token ids unchanged, numbers as
ggml makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.quantizer import dequantize_rows, quantize_rows
from specrun.convert import RandomLlama, quantize_head, write_random_llama
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf

Arrays = dict[str, tuple[str, np.ndarray]]


def arrays(width: int = 256) -> Arrays:
    draw = np.random.default_rng(0)

    def matrix(*shape: int) -> tuple[str, np.ndarray]:
        return "F16", draw.standard_normal(shape).astype(np.float16)

    return {
        "medusa.0.res.weight": matrix(width, width),
        "medusa.0.res.bias": ("F16", np.linspace(-1, 1, width).astype(np.float16)),
        "medusa.0.output.weight": matrix(96, width),
        "medusa.1.output.weight": matrix(96, width),
        "token_embd.weight": matrix(96, width),
        "output_norm.weight": ("F32", np.ones(width, np.float32)),
        "d2t": ("I64", np.arange(96, dtype=np.int64)),
        "experts.weight": matrix(2, 8, width),
    }


@pytest.fixture
def write_head(tmp_path: Path) -> Callable[..., Path]:
    def write(architecture: str = "medusa", width: int = 256) -> Path:
        metadata = Metadata()
        metadata.count(f"{architecture}.embedding_length", width)
        metadata.integers(f"{architecture}.target_layers", [1, 2, 3])
        planned = [
            PlannedTensor(name, array.shape, kind, lambda array=array: array)
            for name, (kind, array) in arrays(width).items()
        ]
        write_gguf(tmp_path / "head.gguf", architecture, metadata, planned)
        return tmp_path / "head.gguf"

    return write


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.type_name for tensor in read_header(path).tensors}


def numbers(path: Path, name: str) -> np.ndarray:
    tensor = next(info for info in read_header(path).tensors if info.name == name)
    raw = np.fromfile(path, np.uint8, tensor.n_bytes, offset=tensor.offset)
    if tensor.type_name in ("F32", "F16", "I64"):
        kind = {"F32": np.float32, "F16": np.float16, "I64": np.int64}[tensor.type_name]
        return raw.view(kind).reshape(tensor.shape[::-1])
    rows = raw.reshape(int(np.prod(tensor.shape[1:])), -1)
    return dequantize_rows(rows, tensor.type_name, tensor.shape[0]).reshape(tensor.shape[::-1])


@pytest.mark.parametrize("architecture", ["medusa", "hydra", "eagle"])
def test_heads_become_q8_0_with_vectors_in_f32(write_head, tmp_path, architecture) -> None:
    seen = []
    source = write_head(architecture)
    report = quantize_head(source, tmp_path / "q", progress=lambda *step: seen.append(step))
    found = kinds(tmp_path / "q")
    assert {name for name, kind in found.items() if kind == "Q8_0"} == {
        name for name, (_, array) in arrays().items() if array.ndim > 1
    }
    assert (found["medusa.0.res.bias"], found["output_norm.weight"], found["d2t"]) == (
        "F32",
        "F32",
        "I64",
    )
    np.testing.assert_array_equal(numbers(tmp_path / "q", "d2t"), np.arange(96))
    for name, (kind, array) in arrays().items():
        if kind == "F16":
            assert np.abs(numbers(tmp_path / "q", name) - array).max() < 0.02
    header = read_header(tmp_path / "q")
    assert header.architecture == architecture
    assert header.file_type_name == report.file_type == "Q8_0"
    assert header.metadata[f"{architecture}.target_layers"].tolist() == [1, 2, 3]
    assert report.n_bytes == (tmp_path / "q").stat().st_size
    assert seen[-1][0] == seen[-1][1]


def test_bytes_are_ggmls_own(write_head, tmp_path) -> None:
    quantize_head(write_head(), tmp_path / "q", "q4_k_m", n_threads=2)
    tensor = next(
        info for info in read_header(tmp_path / "q").tensors if info.name == "medusa.0.res.weight"
    )
    assert tensor.type_name == "Q4_K"
    raw = np.fromfile(tmp_path / "q", np.uint8, tensor.n_bytes, offset=tensor.offset)
    rows = arrays()["medusa.0.res.weight"][1].astype(np.float32)
    np.testing.assert_array_equal(raw, quantize_rows(rows, "Q4_K", n_threads=1).reshape(-1))


def test_single_types(write_head, tmp_path) -> None:
    quantize_head(
        write_head(),
        tmp_path / "q",
        "Q4_0",
        output_tensor_type="q6_k",
        token_embedding_type="F16",
        tensor_types=[("res", "Q5_0")],
    )
    found = kinds(tmp_path / "q")
    assert found["medusa.0.output.weight"] == found["medusa.1.output.weight"] == "Q6_K"
    assert (found["token_embd.weight"], found["medusa.0.res.weight"], found["experts.weight"]) == (
        "F16",
        "Q5_0",
        "Q4_0",
    )
    quantize_head(tmp_path / "head.gguf", tmp_path / "left", "Q4_0", leave_output_tensor=True)
    assert kinds(tmp_path / "left")["medusa.1.output.weight"] == "F16"


def test_rows_that_do_not_divide_get_the_type_llama_cpp_would_take(write_head, tmp_path) -> None:
    report = quantize_head(write_head(width=64), tmp_path / "q", "Q4_K_M")
    assert kinds(tmp_path / "q")["medusa.0.res.weight"] == "Q5_0"
    assert report.n_substituted == 5


def test_what_is_refused(write_head, tmp_path) -> None:
    source = write_head()
    with pytest.raises(
        OptionError, match="IQ2_XS needs an importance matrix, and there are none for heads"
    ):
        quantize_head(source, tmp_path / "q", "IQ2_XS")
    with pytest.raises(OptionError, match="did you mean Q8_0"):
        quantize_head(source, tmp_path / "q", "Q8")
    quantize_head(source, tmp_path / "q8")
    with pytest.raises(OptionError, match=r"quantized already \(Q8_0\).*--allow-requantize"):
        quantize_head(tmp_path / "q8", tmp_path / "q", "Q4_0")
    assert not (tmp_path / "q").exists()
    quantize_head(tmp_path / "q8", tmp_path / "q", "Q4_0", allow_requantize=True)
    assert (
        np.abs(
            numbers(tmp_path / "q", "medusa.0.res.weight") - arrays()["medusa.0.res.weight"][1]
        ).max()
        < 0.5
    )
    write_random_llama(tmp_path / "model", RandomLlama())
    with pytest.raises(UnsupportedModelError, match="is a llama, no head"):
        quantize_head(tmp_path / "model", tmp_path / "m")
