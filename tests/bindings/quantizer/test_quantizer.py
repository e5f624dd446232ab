"""Every type the quantizer offers: its error, its size in the table, and options checked before
native code."""

from __future__ import annotations

import logging
import os
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header, stored_bytes
from specrun.bindings.quantizer import (
    FILE_TYPES,
    TENSOR_NUMBERS,
    QuantizeOptions,
    dequantize_rows,
    needs_importance,
    quantize_file,
    quantize_rows,
)
from specrun.convert.random_model import RandomLlama, write_random_llama

# Root mean square error of normally distributed weights of spread 1, a tenth above what each type
# was measured with.
ERRORS = {
    "F32": 1e-7,
    "F16": 2.3e-4,
    "BF16": 1.9e-3,
    "Q8_0": 0.006,
    "Q6_K": 0.019,
    "Q5_K": 0.039,
    "Q5_1": 0.038,
    "Q5_0": 0.045,
    "Q4_K": 0.078,
    "Q4_1": 0.077,
    "Q4_0": 0.090,
    "IQ4_NL": 0.083,
    "IQ4_XS": 0.084,
    "MXFP4": 0.127,
    "NVFP4": 0.104,
    "Q3_K": 0.16,
    "IQ3_S": 0.18,
    "IQ3_XXS": 0.235,
    "Q2_K": 0.295,
    "Q1_0": 0.66,
    "Q2_0": 0.79,
    "TQ2_0": 0.89,
    "TQ1_0": 0.89,
}


SLOW = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"}  # ggml makes tables for seconds


def test_every_tensor_type_has_an_expected_error():
    assert set(ERRORS) | SLOW == set(TENSOR_NUMBERS)
    assert {kind.base_type for kind in FILE_TYPES.values()} <= set(TENSOR_NUMBERS)


@pytest.mark.parametrize("kind", ERRORS)
def test_every_type_round_trips_within_its_error(kind):
    rows = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    blocks = quantize_rows(rows, kind, n_threads=2)
    assert blocks.shape == (16, stored_bytes((256,), kind))
    error = float(np.sqrt(np.mean((dequantize_rows(blocks, kind, 256) - rows) ** 2)))
    assert error <= ERRORS[kind]
    assert error > ERRORS[kind] / 3 or kind == "F32"


@pytest.mark.parametrize("kind", sorted({*TENSOR_NUMBERS} - {"Q1_0", "Q2_0"}))
def test_every_type_is_read_as_the_package_reads_it(kind):  # which lacks Q1_0 and Q2_0
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (16, stored_bytes((256,), kind)), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some scales are infinite
        expected = dequantize(blocks, GGMLQuantizationType[kind]).reshape(16, 256)
    np.testing.assert_allclose(dequantize_rows(blocks, kind, 256), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantizer") / "wide.gguf"
    write_random_llama(path, RandomLlama(width=256, ffn=256, layers=1, scale=2.0))
    return path


def weights(path: Path, name: str) -> np.ndarray:
    """The float32 rows of a matrix of a file."""
    tensor = next(each for each in read_header(path).tensors if each.name == name)
    raw = np.fromfile(path, np.uint8, tensor.n_bytes, offset=tensor.offset)
    return dequantize_rows(raw.reshape(tensor.shape[1], -1), tensor.type_name, tensor.shape[0])


def test_importance_moves_the_error_of_the_smallest_types(source, tmp_path):
    """IQ2_XXS is one that ggml makes with importance only, and the quickest of those."""
    name, rows = "blk.0.attn_q.weight", weights(source, "blk.0.attn_q.weight")
    means = np.random.default_rng(1).chisquare(1, rows.shape[1]).astype(np.float32) + 0.1
    plain, weighed = [], []
    for chosen in (np.ones_like(means), means):
        options = QuantizeOptions(
            "Q8_0", n_threads=1, tensor_types=((name, "IQ2_XXS"),), importance={name: chosen}
        )
        quantize_file(source, tmp_path / "m", options)
        squares = (weights(tmp_path / "m", name) - rows) ** 2
        plain.append(float(np.sqrt(np.mean(squares) / np.mean(rows**2))))
        weighed.append(float(np.mean(squares * means)))
    assert 0.2 < plain[0] < 0.38
    assert weighed[1] < 0.8 * weighed[0]


@pytest.mark.parametrize(
    "name", [name for name, kind in FILE_TYPES.items() if kind.needs_importance]
)
def test_types_that_need_importance_say_so(name, source, caplog):
    # The table speaks of a large model; a plan of a small one must name at least one such tensor,
    # too.
    caplog.set_level(logging.INFO, "specrun.llama")
    quantize_file(source, None, QuantizeOptions(name))
    if name != "Q2_K_S":
        assert any("will require an imatrix" in record.getMessage() for record in caplog.records)
    # Tokens are refused only if ggml would end the process.
    asserts = FILE_TYPES[name].base_type in ("IQ1_S", "IQ2_XXS", "IQ2_XS")
    assert needs_importance("token_embd.weight", FILE_TYPES[name].base_type, name) == asserts


def test_the_table_of_sizes_is_the_quantizers_own(tmp_path, caplog):
    """The bits of a weight in the help: a dry run over the shapes of Llama-3.1-8B, whose numbers
    are a hole."""
    path = tmp_path / "large.gguf"
    write_shapes_of_a_large_llama(path)
    nothing = {"no such tensor": np.ones(1, np.float32)}  # types are chosen as with importance
    caplog.set_level(logging.INFO, "specrun.llama")
    for name, kind in FILE_TYPES.items():
        caplog.clear()
        quantize_file(path, None, QuantizeOptions(name, importance=nothing))
        text = "\n".join(record.getMessage() for record in caplog.records)
        found = re.search(r"quant size .*\(([\d.]+) BPW\)", text)
        assert found
        assert float(found[1]) == pytest.approx(kind.bits_per_weight, abs=0.0051), name
        base = {"MXFP4_MOE": "Q8_0"}.get(name, kind.base_type)  # MXFP4 is for experts only
        assert f"({base.lower()})" in text.lower() or name == "F16", name
        caplog.clear()
        quantize_file(path, None, QuantizeOptions(name))
        refused = any("will require an imatrix" in record.getMessage() for record in caplog.records)
        assert refused == kind.needs_importance, name


def write_shapes_of_a_large_llama(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    counts = {
        "context_length": 8192,
        "embedding_length": 4096,
        "block_count": 32,
        "feed_forward_length": 14336,
    }
    counts |= {
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "rope.dimension_count": 128,
    }
    for key, value in counts.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("general.file_type", 1)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (128256, 4096),
        "output": (128256, 4096),
        "output_norm": (4096,),
    }
    for layer in range(32):
        block = {
            "attn_norm": (4096,),
            "attn_q": (4096, 4096),
            "attn_k": (1024, 4096),
            "attn_v": (1024, 4096),
        }
        block |= {"attn_output": (4096, 4096), "ffn_norm": (4096,), "ffn_gate": (14336, 4096)}
        block |= {"ffn_up": (14336, 4096), "ffn_down": (4096, 14336)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    total = 0
    for name, shape in shapes.items():
        kind = np.dtype(np.float16 if len(shape) > 1 else np.float32)
        writer.add_tensor_info(f"{name}.weight", shape, kind, prod(shape) * kind.itemsize)
        total += prod(shape) * kind.itemsize
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_ti_data_to_file,
    ):
        write()
    writer.close()
    os.truncate(path, path.stat().st_size + total + 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file_type": "q8_0"}, "file type is 'q8_0'"),
        ({"file_type": "Q8_0", "n_threads": -1}, "n_threads is -1"),
        ({"file_type": "Q8_0", "output_tensor_type": "Q8_K"}, "tensor type is 'Q8_K'"),
        ({"file_type": "Q8_0", "tensor_types": (("", "Q8_0"),)}, "name in a tensor type is empty"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(OptionError, match=message):
        QuantizeOptions(**options)


def test_rows_that_cannot_be_stored_are_refused():
    rows = np.ones((2, 64), np.float32)
    for kind in ("Q4_K", "Q8_K", "nonsense"):
        with pytest.raises(OptionError, match="64 numbers cannot be stored"):
            quantize_rows(rows, kind)
    with pytest.raises(OptionError, match="needs an importance matrix"):
        quantize_rows(np.ones((1, 256), np.float32), "IQ2_XS")
    with pytest.raises(OptionError, match="are no rows"):
        dequantize_rows(np.zeros((1, 33), np.uint8), "Q8_0", 32)
