"""Files are those of llama.cpp's own API, byte for byte; options that do not fit are refused
before."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np
import pytest
from support.importance import matrix_for

from specrun.bindings.errors import MalformedFileError, OptionError, PairError, SpecrunError
from specrun.bindings.gguf import read_header
from specrun.bindings.library import llama
from specrun.convert import (
    ImportanceMatrix,
    RandomLlama,
    quantize_model,
    write_importance,
    write_random_llama,
)

Q6_K, Q8_0 = 14, 8  # ggml_type


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "wide.gguf"
    write_random_llama(path, RandomLlama(width=256, ffn=512, layers=2, scale=2.0, file_type="F16"))
    return path


@pytest.fixture(scope="module")
def matrix(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matrix") / "m.gguf"
    write_importance(path, matrix_for(source))
    return path


def by_llama_cpp(
    source: Path, output: Path, file_type: int, matrix: ImportanceMatrix | None = None, **fields
) -> None:
    """llama.cpp's quantizer as any program calls it, with nothing of specrun's bindings around
    it."""
    llama()  # the backends
    params = native.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 2
    for name, value in fields.items():
        setattr(params, name, value)
    if matrix:
        entries = (native.llama_model_imatrix_data * (len(matrix.entries) + 1))()
        kept = []
        for number, (name, entry) in enumerate(matrix.entries.items()):
            means = (entry.sums / np.float32(640)).reshape(-1)
            kept.append(means)
            entries[number].name, entries[number].size = name.encode(), means.size
            entries[number].data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(native.llama_model_imatrix_data))
    assert (
        native.llama_model_quantize(
            str(source).encode(), str(output).encode(), ctypes.byref(params)
        )
        == 0
    )


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    data = path.read_bytes()
    return {
        info.name: (info.type_name, data[info.offset : info.offset + info.n_bytes])
        for info in read_header(path).tensors
    }


@pytest.mark.parametrize(
    ("name", "number", "with_matrix", "ours", "theirs"),
    [
        (
            *("q4_0", 2, True),
            {"output_tensor_type": "q8_0", "token_embedding_type": "Q6_K"},
            {"output_tensor_type": Q8_0, "token_embedding_type": Q6_K},
        ),
        ("Q2_K_S", 21, True, {"pure": True}, {"pure": True}),
        ("Q5_K", 17, True, {"leave_output_tensor": True}, {"quantize_output_tensor": False}),
        ("COPY", 0, False, {}, {"only_copy": True}),
    ],
)
def test_tensors_equal_those_of_llama_cpps_own_api(
    name, number, with_matrix, ours, theirs, source, matrix, tmp_path
) -> None:
    quantize_model(
        source,
        tmp_path / "ours",
        name,
        n_threads=1,
        imatrix=matrix if with_matrix else None,
        **ours,
    )
    by_llama_cpp(
        source, tmp_path / "theirs", number, matrix_for(source) if with_matrix else None, **theirs
    )
    assert tensors(tmp_path / "ours") == tensors(tmp_path / "theirs")


def test_types_of_single_tensors_equal_llama_cpps(source, tmp_path) -> None:
    overrides = [(r"blk\.0\.attn_(q|v)", "Q8_0"), ("ffn_down", "q6_k")]
    quantize_model(source, tmp_path / "ours", "Q4_K_S", n_threads=1, tensor_types=overrides)
    pairs = (native.llama_model_tensor_override * 3)()
    pairs[0].pattern, pairs[0].type = rb"blk\.0\.attn_(q|v)", Q8_0
    pairs[1].pattern, pairs[1].type = b"ffn_down", Q6_K
    pointer = ctypes.cast(pairs, ctypes.POINTER(native.llama_model_tensor_override))
    by_llama_cpp(source, tmp_path / "theirs", 14, tt_overrides=pointer)
    ours = tensors(tmp_path / "ours")
    assert ours == tensors(tmp_path / "theirs")
    chosen = {name: kind for name, (kind, _) in ours.items()}
    assert chosen["blk.0.attn_q.weight"] == chosen["blk.0.attn_v.weight"] == "Q8_0"
    assert chosen["blk.1.ffn_down.weight"] == "Q6_K"
    assert chosen["blk.1.attn_q.weight"] == "Q4_K"


def test_the_file_says_which_matrix_it_was_made_with(source, matrix, tmp_path) -> None:
    report = quantize_model(source, tmp_path / "m", "Q4_0", n_threads=1, imatrix=matrix)
    said = {
        key: value
        for key, value in read_header(tmp_path / "m").metadata.items()
        if "imatrix" in key
    }
    assert said == {
        "quantize.imatrix.file": "m.gguf",
        "quantize.imatrix.dataset": "text.txt",
        "quantize.imatrix.entries_count": 14,
        "quantize.imatrix.chunks_count": 5,
    }
    assert report.n_without_importance == 0


def test_progress_comes_tensor_by_tensor(source, tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    quantize_model(
        source, tmp_path / "m", "Q8_0", n_threads=1, progress=lambda *step: seen.append(step)
    )
    header = read_header(source)
    total = sum(tensor.n_bytes for tensor in header.tensors)
    assert len(seen) == len(header.tensors)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


# -- refusals --------------------------------------------------------------------------------------


def assert_refused(
    source: Path, folder: Path, kind: type[Exception], message: str, name: str = "Q4_0", **options
) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(kind, match=message) as caught:
        quantize_model(source, folder / "out.gguf", name, n_threads=1, **options)
    assert "\n" not in str(caught.value)
    assert sorted(folder.iterdir()) == before


def test_a_type_that_needs_a_matrix_is_refused_without(source, tmp_path) -> None:
    assert_refused(
        source,
        tmp_path,
        OptionError,
        "needs an importance matrix: make one with specrun imatrix",
        "iq2_xs",
    )


def test_token_matrices_in_a_type_that_would_end_the_process_are_refused(
    source, matrix, tmp_path
) -> None:
    message = r"token_embd\.weight as IQ2_XS, which needs an importance matrix"
    assert_refused(source, tmp_path, OptionError, message, token_embedding_type="iq2_xs")
    message = r"no entry for output\.weight, as usual, .* --token-embedding-type"
    assert_refused(source, tmp_path, OptionError, message, "IQ2_XS", pure=True, imatrix=matrix)


def test_a_matrix_of_another_model_is_refused(source, tmp_path) -> None:
    for spec, message in (
        (
            RandomLlama(width=256, ffn=256, layers=1),
            "another model: it has 256 inputs for blk.0.ffn_down.weight.* 512",
        ),
        (
            RandomLlama(width=256, ffn=512, layers=3),
            r"another model: it has blk\.2\.\w+\.weight, which .* lacks",
        ),
    ):
        write_random_llama(tmp_path / "other.gguf", spec, force=True)
        write_importance(tmp_path / "m.gguf", matrix_for(tmp_path / "other.gguf"), force=True)
        assert_refused(source, tmp_path, PairError, message, imatrix=tmp_path / "m.gguf")


def test_a_matrix_with_holes_is_enough_where_none_is_needed(source, tmp_path) -> None:
    write_importance(tmp_path / "m.gguf", matrix_for(source, leave_out="ffn_up"))
    report = quantize_model(
        source, tmp_path / "q4", "Q4_0", n_threads=1, imatrix=tmp_path / "m.gguf"
    )
    assert report.n_without_importance == 2
    message = r"no entry for blk\.0\.ffn_up\.weight.* to become IQ2_XXS"
    assert_refused(source, tmp_path, PairError, message, "IQ2_XXS", imatrix=tmp_path / "m.gguf")


def test_a_file_that_is_no_matrix_is_refused(source, tmp_path) -> None:
    (tmp_path / "text").write_text("not a matrix")
    assert_refused(
        source, tmp_path, MalformedFileError, "is no importance matrix", imatrix=tmp_path / "text"
    )
    assert_refused(source, tmp_path, MalformedFileError, "but no importance matrix", imatrix=source)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "Q4_0",
            {"tensor_types": [("atn_q", "Q8_0")]},
            r"no tensor of .* has a name with 'atn_q' \(did you mean attn_q",
        ),
        (
            "Q4_0",
            {"tensor_types": [("attn_(", "Q8_0")]},
            r"'attn_\(' in a tensor type is no regular expression",
        ),
        ("Q4_0", {"tensor_types": [("attn_q", "Q8")]}, r"no tensor type 'Q8' \(did you mean Q8_"),
        ("F16", {"tensor_types": [("attn_q", "Q8_0")]}, "have no effect with F16"),
        ("Q4_0", {"output_tensor_type": "Q5_K_M"}, r"no tensor type 'Q5_K_M' \(did you mean Q5_K"),
    ],
)
def test_single_types_that_cannot_be_meant(source, tmp_path, name, options, message) -> None:
    assert_refused(source, tmp_path, OptionError, message, name, **options)


def test_a_type_whose_blocks_do_not_divide_the_rows_is_refused(tmp_path) -> None:
    write_random_llama(tmp_path / "narrow.gguf", RandomLlama(width=64, ffn=64, layers=1))
    message = "rows of 64 numbers in output.weight, which do not divide into Q6_K's blocks"
    assert_refused(
        tmp_path / "narrow.gguf", tmp_path, OptionError, message, output_tensor_type="Q6_K"
    )


def test_a_disk_without_room_is_refused_before_writing(source, tmp_path, monkeypatch) -> None:
    from specrun.bindings import files

    usage = type(files.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    assert_refused(source, tmp_path, SpecrunError, r"MB are needed .* free some space")
