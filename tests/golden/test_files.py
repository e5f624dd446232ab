"""Hashes of converted and quantized files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import (
    llama_config,
    llama_tensors,
    safetensors_bytes,
    tokenizer_files,
)
from support.tiny_eagle import random_eagle
from support.tiny_heads import random_medusa

from golden.record import check
from specrun.convert import RandomLlama, convert_checkpoint, quantize_model, write_random_llama
from specrun.convert.quantize.quantize_head import quantize_head

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one key per head": {"num_key_value_heads": 1},
}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # names go into the files
    return tmp_path


def test_converted_and_quantized_files(folder: Path) -> None:
    found = {}
    for name, changes in CHANGES.items():
        checkpoint = Path("checkpoint")
        checkpoint.mkdir(exist_ok=True)
        config = llama_config(**changes)
        tensors = llama_tensors(config)
        (checkpoint / "config.json").write_text(json.dumps(config))
        (checkpoint / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        for file, content in tokenizer_files(config["vocab_size"]).items():
            (checkpoint / file).write_text(json.dumps(content))
        for outtype in ("f32", "f16", "q8_0"):
            report = convert_checkpoint(checkpoint, Path(f"{outtype}.gguf"), outtype=outtype)
            found[f"{name}, {outtype}"] = digest(report.output)
            report.output.unlink()
    write_random_llama(Path("f16.gguf"), RandomLlama(width=256, ffn=256, layers=2, file_type="F16"))
    found["random"] = digest(Path("f16.gguf"))
    for kind in ("Q8_0", "Q4_0", "Q4_K_M", "Q6_K"):
        quantize_model(Path("f16.gguf"), Path(f"{kind}.gguf"), kind, n_threads=1)
        found[f"random, {kind}"] = digest(Path(f"{kind}.gguf"))
    for name, path in (
        ("eagle", random_eagle(32).write(Path("eagle.gguf"), 320)),
        ("medusa", random_medusa(32, 320).write(Path("medusa.gguf"), 320)),
    ):
        found[name] = digest(path)
        quantize_head(path, Path(f"{name}-q8.gguf"), "Q8_0")
        found[f"{name}, Q8_0"] = digest(Path(f"{name}-q8.gguf"))
    check("files", found)
