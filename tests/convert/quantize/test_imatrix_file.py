"""Importance matrices interchange with llama.cpp: its own reader reads ours, we read its legacy
files."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from specrun.bindings.errors import FileMissingError, MalformedFileError, OptionError
from specrun.bindings.library import native_function
from specrun.convert import ImportanceMatrix, merge_importance, read_importance, write_importance
from specrun.convert.quantize import ImportanceEntry


def entry(n: int, width: int, seed: int, counts: list[int]) -> ImportanceEntry:
    sums = np.random.default_rng(seed).chisquare(1, (n, width)).astype(np.float32)
    return ImportanceEntry(sums, np.array(counts, np.int64))


@pytest.fixture
def matrix() -> ImportanceMatrix:
    entries = {
        "blk.0.attn_q.weight": entry(1, 8, 0, [640]),
        "blk.0.ffn_down_exps.weight": entry(4, 6, 1, [3, 0, 600, 37]),
    }
    return ImportanceMatrix(entries, ("a text", "another"), 5, 128, 5, "ab" * 32)


def test_what_is_written_is_read_back(matrix: ImportanceMatrix, tmp_path: Path) -> None:
    write_importance(tmp_path / "m.gguf", matrix)
    back = read_importance(tmp_path / "m.gguf")
    for name, stored in matrix.entries.items():
        np.testing.assert_array_equal(back.entries[name].sums, stored.sums)
        np.testing.assert_array_equal(back.entries[name].counts, stored.counts)
    assert (back.datasets, back.chunk_count, back.chunk_size) == (("a text", "another"), 5, 128)
    assert (back.next_chunk, back.text_sha256) == (5, "ab" * 32)


def test_llama_cpps_own_reader_reads_it(matrix: ImportanceMatrix, tmp_path: Path) -> None:
    """gguf_init_from_file of the library that llama-quantize uses: keys, types, names, shapes and
    numbers."""

    class Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    write_importance(tmp_path / "m.gguf", matrix)
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    opened = native_function("gguf_init_from_file", pointer, text, Params)(
        bytes(tmp_path / "m.gguf"), Params(True, None)
    )
    assert opened
    find = native_function("gguf_find_key", ctypes.c_int64, pointer, text)
    number = native_function("gguf_get_val_u32", ctypes.c_uint32, pointer, ctypes.c_int64)
    string = native_function("gguf_get_val_str", text, pointer, ctypes.c_int64)
    item = native_function("gguf_get_arr_str", text, pointer, ctypes.c_int64, ctypes.c_size_t)
    assert string(opened, find(opened, b"general.type")) == b"imatrix"
    assert item(opened, find(opened, b"imatrix.datasets"), 1) == b"another"
    assert number(opened, find(opened, b"imatrix.chunk_count")) == 5
    assert number(opened, find(opened, b"imatrix.chunk_size")) == 128
    assert find(opened, b"general.architecture") == -1
    n_tensors = native_function("gguf_get_n_tensors", ctypes.c_int64, pointer)(opened)
    name_of = native_function("gguf_get_tensor_name", text, pointer, ctypes.c_int64)
    names = [name_of(opened, index).decode() for index in range(n_tensors)]
    # llama-imatrix's order: by name, sums before counts.
    assert names == [
        f"{name}.{part}" for name in sorted(matrix.entries) for part in ("in_sum2", "counts")
    ]
    kind_of = native_function("gguf_get_tensor_type", ctypes.c_int, pointer, ctypes.c_int64)
    assert {kind_of(opened, index) for index in range(n_tensors)} == {0}
    native_function("gguf_free", None, pointer)(opened)
    by_package = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    experts = by_package["blk.0.ffn_down_exps.weight.in_sum2"]
    assert experts.shape.tolist() == [6, 4]
    np.testing.assert_array_equal(experts.data, matrix.entries["blk.0.ffn_down_exps.weight"].sums)
    assert by_package["blk.0.ffn_down_exps.weight.counts"].data.reshape(-1).tolist() == [
        3,
        0,
        600,
        37,
    ]
    assert by_package["blk.0.ffn_down_exps.weight.counts"].shape.tolist() == [1, 4]


def test_means_are_what_llama_quantize_takes(matrix: ImportanceMatrix) -> None:
    means = matrix.means()["blk.0.ffn_down_exps.weight"].reshape(4, 6)
    sums = matrix.entries["blk.0.ffn_down_exps.weight"].sums
    np.testing.assert_array_equal(means[0], sums[0] / np.float32(3))
    np.testing.assert_array_equal(means[1], np.ones(6, np.float32))  # nothing is known: all alike
    np.testing.assert_array_equal(means[2], sums[2] / np.float32(600))


def legacy(means: dict[str, np.ndarray], chunks: int, dataset: str | None) -> bytes:
    """A file of llama.cpp before it wrote GGUF: values are means times chunks."""
    data = struct.pack("<i", len(means))
    for name, values in means.items():
        data += (
            struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", chunks, len(values))
        )
        data += (values * np.float32(chunks)).astype("<f4").tobytes()
    if dataset is not None:
        data += struct.pack("<ii", chunks, len(dataset)) + dataset.encode()
    return data


@pytest.mark.parametrize("dataset", ["old text.txt", None])
def test_the_legacy_format_is_read(tmp_path: Path, dataset: str | None) -> None:
    means = {
        "blk.0.attn_q.weight": np.linspace(0.5, 2, 8, dtype=np.float32),
        "blk.1.ffn_up.weight": np.ones(4),
    }
    (tmp_path / "m.dat").write_bytes(legacy(means, 7, dataset))
    matrix = read_importance(tmp_path / "m.dat")
    for name, values in means.items():
        np.testing.assert_allclose(matrix.means()[name], values, rtol=1e-6)
    assert matrix.datasets == (() if dataset is None else (dataset,))
    assert matrix.chunk_count == (0 if dataset is None else 7)


def test_matrices_are_added_up(matrix: ImportanceMatrix, tmp_path: Path) -> None:
    write_importance(tmp_path / "a.gguf", matrix)
    name = "blk.0.attn_q.weight"
    (tmp_path / "b.dat").write_bytes(legacy({name: np.full(8, 2.0, np.float32)}, 3, "old"))
    report = merge_importance(
        [tmp_path / "a.gguf", tmp_path / "b.dat"], tmp_path / "sum.gguf", chunk_size=128
    )
    both = read_importance(tmp_path / "sum.gguf")
    expected = (matrix.entries[name].sums + 2.0 * 3 * 128).astype(np.float32)
    np.testing.assert_allclose(both.entries[name].sums, expected, rtol=1e-6)
    assert both.entries[name].counts.tolist() == [640 + 3 * 128]
    assert both.datasets == ("a text", "another", "old")
    assert (report.n_entries, report.chunk_count, report.n_partial) == (2, 8, 1)
    with pytest.raises(OptionError, match="no text and no matrix"):
        merge_importance([], tmp_path / "none.gguf")


def test_damaged_files_are_one_sentence(matrix: ImportanceMatrix, tmp_path: Path) -> None:
    path = tmp_path / "m"
    whole = legacy({"blk.0.attn_q.weight": np.ones(8, np.float32)}, 7, "text")
    for cut in range(4 + 4 + 19 + 8 + 8 * 4):
        path.write_bytes(whole[:cut])
        with pytest.raises(MalformedFileError, match="is no importance matrix"):
            read_importance(path)
    for data in (struct.pack("<i", -1), struct.pack("<ii", 1, 2**31 - 1) + b"x", b"\xff" * 64):
        path.write_bytes(data)
        with pytest.raises(MalformedFileError, match="is no importance matrix"):
            read_importance(path)
    matrix.entries["blk.0.attn_q.weight"].sums[0, 3] = np.nan
    write_importance(path, matrix, force=True)
    with pytest.raises(MalformedFileError, match=r"blk\.0\.attn_q\.weight that cannot be"):
        read_importance(path)
    with pytest.raises(FileMissingError, match="cannot be read"):
        read_importance(tmp_path / "none")
