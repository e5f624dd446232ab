"""Results of a conversion: name, metadata, the source's hash, any type; and nothing if
it fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from support.importance import matrix_for
from support.tiny_checkpoints import llama_config, llama_tensors, safetensors_bytes

from specrun.bindings.errors import (
    MalformedFileError,
    OptionError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.convert import conversion, convert_checkpoint, plan_conversion, tensor_stream
from specrun.convert.checkpoint import source_tensor as source_digest
from specrun.convert.gguf import ModelName, file_name, name_of
from specrun.convert.quantize import quantize_model, write_importance

HEAD = "lm_head.weight"


def bf16_bits(array: Any) -> Any:
    return (array.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("outtype", ["f16", "bf16", "f32"])
def test_pieces_give_the_same_numbers_as_whole_tensors(
    tmp_path, write_checkpoint, monkeypatch, outtype
) -> None:
    tensors = {name: bf16_bits(array) for name, array in llama_tensors(llama_config()).items()}
    folder = write_checkpoint(tensors=tensors)
    convert_checkpoint(folder, tmp_path / "whole.gguf", outtype=outtype)
    for module in (source_digest, tensor_stream):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    seen: list[int] = []
    convert_checkpoint(
        folder,
        tmp_path / "m.gguf",
        outtype=outtype,
        progress=lambda done, _total: seen.append(done),
    )
    assert len(seen) > 80
    start = read_header(tmp_path / "m.gguf").tensors[0].offset
    assert (tmp_path / "m.gguf").read_bytes()[start:] == (tmp_path / "whole.gguf").read_bytes()[
        start:
    ]


def test_the_source_hash_follows_every_number_and_file(tmp_path: Path, write_checkpoint) -> None:
    first = convert_checkpoint(write_checkpoint(), tmp_path / "a.gguf")
    header = read_header(first.output)
    assert header.metadata["specrun.source.sha256"] == first.source_sha256
    assert len(set(first.source_sha256)) > 8
    assert convert_checkpoint(
        write_checkpoint(), tmp_path / "b.gguf", outtype="f32"
    ).source_sha256 == (first.source_sha256)
    tensors = llama_tensors(llama_config())
    tensors[HEAD][299, 31] += 1e-6
    changed = convert_checkpoint(write_checkpoint(tensors=tensors), tmp_path / "c.gguf")
    assert changed.source_sha256 != first.source_sha256
    config = write_checkpoint(llama_config(rope_theta=5001.0))
    assert convert_checkpoint(config, tmp_path / "d.gguf").source_sha256 != first.source_sha256


def test_the_metadata_says_what_the_model_is(tmp_path: Path, write_checkpoint) -> None:
    card = b"---\nlicense: apache-2.0\ntags: [one, two]\nlanguage: en\n---\n# Model\n"
    folder = write_checkpoint(**{"README.md": card}).rename(tmp_path / "Tiny-Chat-v2")
    report = convert_checkpoint(folder, tmp_path)
    assert report.output == tmp_path / "Tiny-35K-Chat-v2-F16.gguf"
    metadata = read_header(report.output).metadata
    wanted = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Tiny-Chat-v2",
        "general.basename": "Tiny",
        "general.finetune": "Chat",
        "general.version": "v2",
        "general.size_label": "35K",
        "general.license": "apache-2.0",
        "general.file_type": 1,
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "gpt2",
    }
    assert {key: metadata[key] for key in wanted} == wanted
    assert list(metadata["general.tags"]) == ["one", "two"]
    assert list(metadata["general.languages"]) == ["en"]


@pytest.mark.parametrize(
    "front",
    [b"- 1", b"a: [", b"\xff\xfe", b"[" * 400, b"[" * 60000],
    ids=["list", "open", "bytes", "nested", "deep"],
)
def test_a_card_that_says_nothing_is_no_fault(tmp_path: Path, front: bytes) -> None:
    (tmp_path / "README.md").write_bytes(b"---\n" + front + b"\n---\n")
    assert name_of(tmp_path, 10**6).facts == {}


def test_names_by_the_convention(tmp_path: Path) -> None:
    place = tmp_path / "models--owner--Llama-3.2-1B-Instruct" / "snapshots" / "0123abcd"
    place.mkdir(parents=True)
    name = name_of(place, 1_235_814_400)
    assert file_name(name, "Q4_K_M") == "Llama-3.2-1.2B-Instruct-Q4_K_M.gguf"
    odd = ModelName("../a b", None, "1M", None, None, {})
    assert "/" not in file_name(odd, "F16")
    assert file_name(odd, "F16").endswith("-1M-F16.gguf")


def test_without_a_name_the_file_is_written_here(
    tmp_path: Path, write_checkpoint, monkeypatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    report = convert_checkpoint(write_checkpoint())
    assert [path.name for path in (tmp_path / "here").iterdir()] == [report.output.name]
    with pytest.raises(OptionError, match="already exists"):
        convert_checkpoint(write_checkpoint())


def test_any_type_of_the_quantizer(tmp_path: Path, write_checkpoint) -> None:
    config = llama_config(hidden_size=64, intermediate_size=64)
    folder = write_checkpoint(config, llama_tensors(config))
    report = convert_checkpoint(folder, tmp_path / "m.gguf", outtype="q8_0", n_threads=1)
    header = read_header(report.output)
    assert (header.file_type_name, report.type_name) == ("Q8_0", "Q8_0")
    assert report.tensor_types == header.tensor_type_counts
    assert report.tensor_types["Q8_0"] == 16
    assert header.metadata["specrun.source.sha256"] == report.source_sha256
    assert 8.5 <= report.bits_per_weight < 9
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "m.gguf"}
    # From float32 to Q8_0 at once: the same as quantizing the float32 file.
    assert plan_conversion(folder, outtype="q4_0").type_name == "F32"


def test_a_failing_quantizer_leaves_nothing(tmp_path: Path, write_checkpoint, monkeypatch) -> None:
    for error in (KeyboardInterrupt, SpecrunError):

        def fail(
            *_arguments: object, error: type[BaseException] = error, **_options: object
        ) -> None:
            raise error

        monkeypatch.setattr(conversion, "quantize_model", fail)
        with pytest.raises(error):
            convert_checkpoint(write_checkpoint(), tmp_path / "m.gguf", outtype="q8_0")
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


def test_unknown_types_name_the_nearest(write_checkpoint) -> None:
    for wrong, hint in (("q4_km", "q4_k_m"), ("bf61", "bf16")):
        with pytest.raises(OptionError, match=rf"did you mean {hint}\?"):
            plan_conversion(write_checkpoint(), outtype=wrong)


def test_all_missing_and_all_extra_tensors_are_named(tmp_path: Path, write_checkpoint) -> None:
    tensors = llama_tensors(llama_config())
    gone = [name for name in tensors if ".layers.1." in name]
    weights = safetensors_bytes(
        {name: array for name, array in tensors.items() if name not in gone}
    )
    with pytest.raises(MalformedFileError, match="it is incomplete") as caught:
        convert_checkpoint(write_checkpoint(**{"model.safetensors": weights}), tmp_path / "m.gguf")
    assert all(name in str(caught.value) for name in gone)
    more = {f"extra.{number}": tensors[HEAD] for number in range(7)}
    with pytest.raises(UnsupportedModelError, match="does not know") as caught_too:
        convert_checkpoint(write_checkpoint(tensors={**tensors, **more}), tmp_path / "m.gguf")
    assert all(name in str(caught_too.value) for name in more)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run as a user without rights: root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_a_folder_that_cannot_be_written(tmp_path: Path, write_checkpoint, monkeypatch) -> None:
    folder = write_checkpoint()
    (tmp_path / "closed").mkdir(mode=0o555)
    for path in (tmp_path, folder, *folder.iterdir()):
        path.chmod(0o755)
    # The folders above belong to the user who runs the tests: relative paths need no way through
    # them.
    monkeypatch.chdir(tmp_path)
    with (
        unprivileged(),
        pytest.raises(
            SpecrunError, match=r"closed/m\.gguf cannot be written \(Permission denied\)"
        ) as e,
    ):
        convert_checkpoint("checkpoint", "closed/m.gguf")
    assert e.value.exit_code == 1
    assert not list((tmp_path / "closed").iterdir())


def test_a_file_that_came_out_otherwise_is_not_kept(
    tmp_path: Path, write_checkpoint, monkeypatch
) -> None:
    monkeypatch.setattr(
        conversion, "check_written", lambda *_: (_ for _ in ()).throw(SpecrunError("other"))
    )
    with pytest.raises(SpecrunError, match="other"):
        convert_checkpoint(write_checkpoint(), tmp_path / "m.gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


@pytest.fixture
def folder_256(write_checkpoint) -> Path:
    """A checkpoint whose rows divide into blocks of 256."""
    config = llama_config(hidden_size=256, intermediate_size=256, num_attention_heads=4)
    return write_checkpoint(config, llama_tensors(config))


def test_a_type_of_the_quantizer_with_an_importance_matrix(
    tmp_path: Path, folder_256: Path
) -> None:
    whole = tmp_path / "whole.gguf"
    convert_checkpoint(folder_256, whole, outtype="f32")
    matrix = tmp_path / "m.gguf"
    write_importance(matrix, matrix_for(whole))
    converted = tmp_path / "a.gguf"
    convert_checkpoint(folder_256, converted, outtype="q4_k", imatrix=matrix, n_threads=1)
    quantize_model(whole, tmp_path / "b.gguf", "q4_k", imatrix=matrix, n_threads=1)
    found, wanted = (
        {tensor.name: bytes(tensor.data) for tensor in GGUFReader(path).tensors}
        for path in (converted, tmp_path / "b.gguf")
    )
    assert found == wanted


def test_importance_that_is_missing_or_of_no_use_is_refused(
    tmp_path: Path, folder_256: Path
) -> None:
    with pytest.raises(OptionError, match="'iq2_xs' needs an importance matrix"):
        plan_conversion(folder_256, outtype="iq2_xs")
    for outtype in ("f16", "auto"):
        with pytest.raises(OptionError, match=f"outtype {outtype} has no use"):
            plan_conversion(folder_256, outtype=outtype, imatrix=tmp_path / "m.gguf")
