"""A converted checkpoint computes the same as the checkpoint, and reads text as its tokenizer
does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from support.llama_reference import reference_logits
from support.tiny_checkpoints import (
    CONTROLS,
    TEMPLATE,
    llama_config,
    llama_tensors,
    safetensors_bytes,
    tokenizer_files,
)
from tokenizers import Tokenizer

from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert import convert_checkpoint

TOKENS = [72, 101, 108, 256, 298, 32, 0, 255, 119, 111, 270, 33]
TEXTS = [
    "hello there",
    "Straße 東京 42\n\n\tdef f(x):  return x",
    "don't we'll  ab cd\n",
    " <|end|> a",
]


def relative_error(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_every_source_type_is_read(tmp_path, write_checkpoint, logits, kind) -> None:
    config = llama_config()
    tensors = llama_tensors(config)
    stored = dict(tensors)
    for name, array in tensors.items():
        if kind == "f16":
            stored[name] = array.astype(np.float16)
            tensors[name] = stored[name].astype(np.float32)
        elif kind == "bf16":
            stored[name] = (array.view(np.uint32) >> 16).astype(np.uint16)
            tensors[name] = (stored[name].astype(np.uint32) << 16).view(np.float32)
    report = convert_checkpoint(
        write_checkpoint(config, stored), tmp_path / "m.gguf", outtype="f32"
    )
    assert report.n_parameters == sum(array.size for array in tensors.values())
    assert (
        relative_error(
            logits(tmp_path / "m.gguf", TOKENS), reference_logits(config, tensors, TOKENS)
        )
        < 1e-4
    )


@pytest.mark.parametrize(("outtype", "bits"), [("f16", 11), ("BF16", 8)])
def test_matrices_are_rounded_to_nearest_and_vectors_kept(
    tmp_path, write_checkpoint, outtype, bits
) -> None:
    tensors = llama_tensors(llama_config())
    report = convert_checkpoint(write_checkpoint(), tmp_path / "m.gguf", outtype=outtype)
    header = read_header(report.output)
    assert header.file_type_name == outtype.upper()
    found = {tensor.name: tensor for tensor in GGUFReader(report.output).tensors}
    np.testing.assert_array_equal(found["output_norm.weight"].data, tensors["model.norm.weight"])
    matrix = found["blk.1.ffn_up.weight"]
    assert matrix.tensor_type.name == outtype.upper()
    values = matrix.data
    if outtype == "BF16":
        values = (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).view(
            np.float32
        )
    wanted = tensors["model.layers.1.mlp.up_proj.weight"]
    # Rounding to nearest is off by at most half of the last bit.
    assert (
        np.abs(values.reshape(wanted.shape) - wanted) <= np.abs(wanted) * 2.0**-bits + 2.0**-25
    ).all()


def test_shards_give_the_same_file(tmp_path, write_checkpoint) -> None:
    tensors = llama_tensors(llama_config())
    whole = write_checkpoint()
    convert_checkpoint(whole, tmp_path / "whole.gguf")
    names = list(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    files = {
        part: safetensors_bytes({name: tensors[name] for name in held})
        for part, held in parts.items()
    }
    write_checkpoint(**{"model.safetensors": None, "model.safetensors.index.json": index, **files})
    convert_checkpoint(whole, tmp_path / "shards.gguf")
    assert (tmp_path / "shards.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_text_is_split_as_the_tokenizer_does(tmp_path, write_checkpoint) -> None:
    config = llama_config(vocab_size=2000, eos_token_id=1998)
    folder = write_checkpoint(config)
    convert_checkpoint(folder, tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with Model(tmp_path / "m.gguf") as model:
        vocabulary = model.vocabulary
        for text in TEXTS:
            assert vocabulary.tokenize(text, parse_special=True) == tokenizer.encode(text).ids
        assert vocabulary.size == 2000  # one more than the tokenizer has
        assert (vocabulary.eos, vocabulary.end_of_generation) == (1998, {1998})
        assert set(vocabulary.special_texts) == set(CONTROLS)
        assert (vocabulary.bos, vocabulary.adds_bos) == (1998, False)  # not llama.cpp's token 11
        assert model.chat_template == TEMPLATE


def test_the_beginning_token_is_added_where_the_post_processor_adds_it(
    tmp_path, write_checkpoint
) -> None:
    settings = {"bos_token": {"content": "<|user|>"}, "eos_token": "<|end|>"}
    post = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}],
    }
    tokenizer = tokenizer_files(299, post_processor={"type": "Sequence", "processors": [post]})[
        "tokenizer.json"
    ]
    folder = write_checkpoint(**{"tokenizer.json": tokenizer, "tokenizer_config.json": settings})
    convert_checkpoint(folder, tmp_path / "m.gguf")
    with Model(tmp_path / "m.gguf") as model:
        assert model.vocabulary.adds_bos
        assert model.vocabulary.bos == 297
        assert model.chat_template is None


def test_a_second_end_token_and_a_template_file(tmp_path, write_checkpoint) -> None:
    extra = {
        "generation_config.json": {"eos_token_id": [298, 297]},
        "chat_template.jinja": b"{{ 1 }}",
    }
    convert_checkpoint(write_checkpoint(**extra), tmp_path / "m.gguf")
    with Model(tmp_path / "m.gguf") as model:
        assert model.vocabulary.end_of_generation == {297, 298}
        assert model.chat_template == "{{ 1 }}"


def test_progress_counts_bytes_up_to_all(tmp_path, write_checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    report = convert_checkpoint(
        write_checkpoint(),
        tmp_path / "m.gguf",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) == report.n_tensors
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(tensor.n_bytes for tensor in read_header(report.output).tensors)
    )


def pairs_folder() -> Path:
    beside = Path(__file__).resolve().parents[3] / "shared" / "pairs"
    return Path(os.environ.get("SPECRUN_PAIRS", beside)) / "manpages"


@pytest.mark.pair
@pytest.mark.skipif(
    not pairs_folder().is_dir(), reason="the model pair is not here (SPECRUN_PAIRS)"
)
@pytest.mark.parametrize("name", ["target", "drafter"])
def test_same_file_as_another_converter_made(
    tmp_path: Path, name: str, greedy_text: Callable[..., str]
) -> None:
    reference = pairs_folder() / f"{name}-f16.gguf"
    convert_checkpoint(pairs_folder() / name, tmp_path / "m.gguf")
    ours, theirs = GGUFReader(tmp_path / "m.gguf"), GGUFReader(reference)
    tensors = {tensor.name: tensor for tensor in ours.tensors}
    assert tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for wanted in theirs.tensors:
        found = tensors[wanted.name]
        assert (found.tensor_type, list(found.shape)) == (wanted.tensor_type, list(wanted.shape))
        # The folder stores norms in float16; the reference was made from the float32 ones.
        kind = np.float16 if wanted.name.endswith("norm.weight") else wanted.data.dtype
        assert found.data.astype(kind).tobytes() == wanted.data.astype(kind).tobytes(), wanted.name
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields[key].types == field.types
            assert ours.fields[key].contents() == field.contents(), key
    assert greedy_text(tmp_path / "m.gguf", "The ls command", 24) == greedy_text(
        reference, "The ls command", 24
    )
