"""Checkpoints that cannot be converted are refused by name, before anything is written; nothing is
left behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.tiny_checkpoints import llama_config, llama_tensors, safetensors_bytes, tokenizer_files

from specrun.bindings import files as files_module
from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    OptionError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.convert import convert_checkpoint

HEAD = "lm_head.weight"


def changed_tensors(**changes: Any) -> bytes:
    """The weights with some replaced, or with None left out."""
    tensors = {**llama_tensors(llama_config()), **changes}
    return safetensors_bytes({name: array for name, array in tensors.items() if array is not None})


def changed_header(find: str, replace: str) -> bytes:
    data = changed_tensors()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(find.encode(), replace.encode(), 1)
    assert header != data[8 : 8 + length]
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def moved(name: str, n_bytes: int, more: int = 0) -> bytes:
    """The weights, the extent of one at another place of the data, which has `more` bytes."""
    data = changed_tensors()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[name]["data_offsets"] = [place + n_bytes for place in header[name]["data_offsets"]]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :] + bytes(more)


def tokenizer(**changes: Any) -> dict[str, Any]:
    return dict(tokenizer_files(299, **changes)["tokenizer.json"])


def tokenizer_model(**changes: Any) -> dict[str, Any]:
    return tokenizer(model={**tokenizer()["model"], **changes})


CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
nan = np.full((300, 32), np.nan, np.float32)
huge = np.full((300, 32), 1e6, np.float32)
nested = b"[" * 100_000
not_ours = {"type": "Metaspace", "replacement": "_"}

# file, its content, words of the message
MISSING = {
    "no config": (CONFIG, None, "no config.json in"),
    "no weights": (WEIGHTS, None, "neither model.safetensors nor"),
    "shard missing": (INDEX, {"weight_map": {HEAD: "a.safetensors"}}, "no a.safetensors"),
    "no tokenizer": (TOKENIZER, None, "no tokenizer.json"),
}
MALFORMED = {
    "config is no JSON": (CONFIG, b"{", "not JSON"),
    "config is nested without end": (CONFIG, nested, "not JSON"),
    "config is a list": (CONFIG, b"[1]", "a JSON list instead of an object"),
    "config is not UTF-8": (CONFIG, b'{"a": "\xff"}', "not JSON"),
    "no architecture": (CONFIG, llama_config(architectures=None), "'architectures'"),
    "width missing": (CONFIG, llama_config(hidden_size=None), "'hidden_size'"),
    "width is a word": (CONFIG, llama_config(hidden_size="32"), "hidden_size = '32'"),
    "layers below zero": (CONFIG, llama_config(num_hidden_layers=-1), "num_hidden_layers = -1"),
    "layers without end": (
        CONFIG,
        llama_config(num_hidden_layers=2**31),
        "no tensor model.layers.2",
    ),
    "heads do not divide": (CONFIG, llama_config(num_attention_heads=5), "divisible by 5 heads"),
    "odd heads": (CONFIG, llama_config(head_dim=7), "width 7, which must be even"),
    "weights empty": (WEIGHTS, b"", "truncated, or not a safetensors"),
    "weights cut": (WEIGHTS, changed_tensors()[:-1], "truncated: .* ends 1 bytes behind"),
    "header longer than the file": (WEIGHTS, b"\xff" * 64, "truncated, or not"),
    "header is no JSON": (WEIGHTS, (9).to_bytes(8, "little") + b"nonsense!", "header .* not JSON"),
    "extent does not fit": (
        WEIGHTS,
        changed_header('"shape": [300, 32]', '"shape": [300, 31]'),
        "takes 38,400 bytes instead of 37,200",
    ),
    "extent below zero": (WEIGHTS, changed_header("[0, ", "[-4, "), "makes no sense"),
    "extents overlap": (
        WEIGHTS,
        moved(HEAD, -4),
        rf"{HEAD} overlaps model\.\S+: it begins at byte \d[\d,]* of the data, and .* ends at \d",
    ),
    "extents lie on one another": (WEIGHTS, moved(HEAD, -4 * 300 * 32), "overlaps"),
    "a gap between extents": (
        WEIGHTS,
        moved(HEAD, 8, more=8),
        f"{HEAD} follows a gap: it begins at byte",
    ),
    "an extent beyond the end": (WEIGHTS, moved(HEAD, 1 << 40), rf"{HEAD} ends \d+ bytes behind"),
    "bytes of no tensor": (
        WEIGHTS,
        changed_tensors() + bytes(12),
        r"no tensor has bytes \d[\d,]* to \d[\d,]* of its data",
    ),
    "a tensor twice": (
        WEIGHTS,
        changed_header('"model.norm.weight"', f'"{HEAD}"'),
        f"'{HEAD}' is there twice",
    ),
    "tensor missing": (WEIGHTS, changed_tensors(**{HEAD: None}), f"no tensor {HEAD}"),
    "tensors missing": (
        WEIGHTS,
        changed_tensors(**{HEAD: None, "model.norm.weight": None}),
        f"no tensor {HEAD}, model.norm.weight: it is incomplete",
    ),
    "tensor of another shape": (
        WEIGHTS,
        changed_tensors(**{HEAD: nan[:, :-1]}),
        r"lm_head.weight of shape \(300, 31\).*\(300, 32\)",
    ),
    "not finite": (WEIGHTS, changed_tensors(**{HEAD: nan}), "lm_head.*not finite"),
    "shard outside": (INDEX, {"weight_map": {HEAD: "../a.safetensors"}}, "not a file of the"),
    "shard lacks a tensor": (INDEX, {"weight_map": {"other": WEIGHTS}}, "lacks the tensor other"),
    "a tensor in two shards": (
        INDEX,
        {"weight_map": {"model.norm.weight": WEIGHTS, HEAD: "more.safetensors"}},
        f"two have {HEAD}: it is in {WEIGHTS} and in more.safetensors",
    ),
    "a tensor twice in the index": (
        INDEX,
        f'{{"weight_map": {{"{HEAD}": "{WEIGHTS}", "{HEAD}": "{WEIGHTS}"}}}}'.encode(),
        f"'{HEAD}' is there twice",
    ),
    "empty index": (INDEX, {}, "names no tensors"),
    "merge of three": (TOKENIZER, tokenizer_model(merges=["a b c"]), "'a b c'.*not two"),
    "no merges": (TOKENIZER, tokenizer_model(merges=[]), "no merges"),
    "token outside": (TOKENIZER, tokenizer_model(vocab={"a": 300}), "'a' the id 300, outside"),
    "two tokens, one id": (TOKENIZER, tokenizer_model(vocab={"a": 1, "b": 1}), "id 1 to 'a' and"),
    "unknown end token": (
        "tokenizer_config.json",
        {"eos_token": "</s>"},
        "'</s>', which the tokenizer lacks",
    ),
    "end token outside": (CONFIG, llama_config(eos_token_id=300.5), "eos_token_id = 300.5"),
}
UNSUPPORTED = {
    "other architecture": (
        CONFIG,
        llama_config(architectures=["MambaForCausalLM"]),
        "'MambaForCausalLM'.*Gemma2ForCausalLM.*LlamaForCausalLM.*convert_hf_to_gguf.py",
    ),
    "other activation": (CONFIG, llama_config(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "feed-forward biases": (CONFIG, llama_config(mlp_bias=True), "mlp_bias = True"),
    "other rope": (
        CONFIG,
        llama_config(rope_scaling={"rope_type": "longrope"}),
        "'longrope': only default",
    ),
    "unknown number type": (WEIGHTS, changed_header('"F32"', '"F8_E4M3"'), "as F8_E4M3"),
    "tensors not known": (
        WEIGHTS,
        changed_tensors(extra=nan, more=nan),
        "does not know: extra, more$",
    ),
    "too large": (WEIGHTS, changed_tensors(**{HEAD: huge}), "1e.06, too large for f16"),
    "doubles too large": (
        WEIGHTS,
        changed_tensors(**{HEAD: np.full((300, 32), 1e300)}),
        r"lm_head.*1e\+300",
    ),
    "whole numbers": (WEIGHTS, changed_tensors(**{HEAD: huge.astype(np.int32)}), "int32"),
    "other tokenizer": (TOKENIZER, tokenizer_model(type="Unigram"), "a Unigram tokenizer"),
    "no byte tokens": (TOKENIZER, tokenizer_model(byte_fallback=True), "no byte token <0x00>"),
    "other splitting": (TOKENIZER, tokenizer(pre_tokenizer=not_ours), "Metaspace"),
    "prefix space": (
        TOKENIZER,
        tokenizer(
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        ),
        "add_prefix_space",
    ),
    "normalizer": (TOKENIZER, tokenizer(normalizer={"type": "NFC"}), "normalizer.*NFC"),
}


FAULTS: dict[str, tuple[str, Any, str]] = {**MISSING, **MALFORMED, **UNSUPPORTED}


@pytest.mark.parametrize("fault", FAULTS)
def test_refused_by_name_with_nothing_left(tmp_path: Path, write_checkpoint, fault: str) -> None:
    file_name, content, words = FAULTS[fault]
    error = UnsupportedModelError if fault in UNSUPPORTED else MalformedFileError
    error = FileMissingError if fault in MISSING else error
    files = {file_name: content}
    if fault == "end token outside":
        files |= {"tokenizer_config.json": {}}
    if fault == "unknown end token":
        files |= {CONFIG: llama_config(eos_token_id=None)}
    if fault == "a tensor in two shards":
        files |= {"more.safetensors": safetensors_bytes({HEAD: nan})}
    folder = write_checkpoint(**files)
    with pytest.raises(error, match=words):
        convert_checkpoint(folder, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_missing_folder_and_file_instead_of_folder(tmp_path: Path, write_checkpoint) -> None:
    with pytest.raises(FileMissingError, match="there is no folder"):
        convert_checkpoint(tmp_path / "none", tmp_path / "m.gguf")
    with pytest.raises(FileMissingError, match=r"is a file; name the checkpoint's folder"):
        convert_checkpoint(write_checkpoint() / CONFIG, tmp_path / "m.gguf")
    with pytest.raises(FileMissingError, match=r"no folder .* to write m\.gguf into"):
        convert_checkpoint(write_checkpoint(), tmp_path / "none" / "m.gguf")


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path, write_checkpoint) -> None:
    output = tmp_path / "m.gguf"
    output.write_bytes(b"precious")
    with pytest.raises(OptionError, match=r"already exists.*--force"):
        convert_checkpoint(write_checkpoint(), output)
    assert output.read_bytes() == b"precious"
    convert_checkpoint(write_checkpoint(), output, force=True)
    assert output.read_bytes().startswith(b"GGUF")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_the_old_file(
    tmp_path: Path, write_checkpoint, error
) -> None:
    folder, output = write_checkpoint(), tmp_path / "m.gguf"
    output.write_bytes(b"precious")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        convert_checkpoint(folder, output, force=True, progress=interrupt)
    assert output.read_bytes() == b"precious"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "m.gguf"}


def test_too_little_space_is_noticed_before_writing(
    tmp_path: Path, write_checkpoint, monkeypatch
) -> None:
    monkeypatch.setattr(
        files_module.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=1000)
    )
    with pytest.raises(SpecrunError, match=r"are needed in .* and 0\.0 MB are free"):
        convert_checkpoint(write_checkpoint(), tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_file_that_shrinks_meanwhile_is_named(tmp_path: Path, write_checkpoint) -> None:
    folder = write_checkpoint()

    def shrink(done: int, total: int) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: len(data) // 8])

    with pytest.raises(MalformedFileError, match="became shorter while it was read"):
        convert_checkpoint(folder, tmp_path / "m.gguf", progress=shrink)
    assert not (tmp_path / "m.gguf").exists()


def test_a_copy_of_tied_embeddings_and_computed_tensors_are_left_out(
    tmp_path: Path, write_checkpoint
) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = llama_tensors(config)
    extra = {
        HEAD: tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": nan,
    }
    report = convert_checkpoint(write_checkpoint(config, {**tensors, **extra}), tmp_path / "m.gguf")
    assert report.n_tensors == len(tensors)


@pytest.mark.parametrize("file_name", [CONFIG, WEIGHTS, TOKENIZER, "tokenizer_config.json"])
def test_damaged_bytes_are_read_or_refused_and_nothing_else(
    tmp_path: Path, write_checkpoint, file_name
) -> None:
    folder = write_checkpoint()
    whole = (folder / file_name).read_bytes()
    source = np.random.default_rng(len(whole))
    refused = 0
    for _ in range(25):
        damaged = bytearray(whole)
        for place in source.integers(0, min(len(whole), 3000), size=3):
            damaged[place] = source.integers(0, 256)
        (folder / file_name).write_bytes(damaged)
        try:
            convert_checkpoint(folder, tmp_path / "m.gguf", force=True)
        except SpecrunError:
            refused += 1
    assert refused > 4
    assert not list(tmp_path.glob(".*"))
