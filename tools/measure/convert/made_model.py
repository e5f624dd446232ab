"""Random checkpoints and models of a wanted size: a Llama with a byte-level vocabulary.

Weights are bfloat16, or F16 where the checkpoint is converted. All matrices repeat one block of
random numbers, because drawing gigabytes would take longer than what is measured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from specrun.bindings.files import require_free_space
from specrun.convert import convert_checkpoint
from specrun.convert.checkpoint import bfloat16_bits
from specrun.convert.random_model import synthetic_vocabulary

_SHARD_BYTES = 512 << 20
_VOCAB_SIZE = 8192
_SMALL_VOCAB_SIZE = 320
_BLOCK = 1 << 20  # numbers that are drawn; matrices repeat them


def write_checkpoint(folder: Path, n_bytes: int, seed: int = 0) -> int:
    """Write shards whose weights have at least `n_bytes`; return the size of the weights in bytes.

    Shapes are those of real models from about 100 MB on; fewer bytes get a narrower one.
    """
    config = _config(n_bytes)
    shapes = dict(_shapes(config))
    numbers = np.random.default_rng(seed).standard_normal(_BLOCK) / config["hidden_size"] ** 0.5
    block = bfloat16_bits(numbers.astype(np.float32))
    ones = bfloat16_bits(np.ones(config["hidden_size"], np.float32)).tobytes()
    shards = _shards(shapes)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        index.update(dict.fromkeys(names, file_name))
        header: dict[str, Any] = {}
        end = 0
        for name in names:
            begin, end = end, end + 2 * prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                left = prod(shapes[name])
                while left > 0:
                    piece = ones[: 2 * left] if "norm" in name else block[:left].data
                    file.write(piece)
                    left -= len(piece) // 2 if "norm" in name else len(piece)
    _write_json(folder / "model.safetensors.index.json", {"weight_map": index})
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", _tokenizer(config["vocab_size"]))
    return 2 * sum(prod(shape) for shape in shapes.values())


def write_f16_model(path: Path, n_bytes: int) -> None:
    """Write a model of about `n_bytes` to `path`; meanwhile twice as much is needed beside it."""
    require_free_space(path.parent, 2 * n_bytes)
    checkpoint = path.parent / "checkpoint"
    checkpoint.mkdir()
    write_checkpoint(checkpoint, n_bytes)
    convert_checkpoint(checkpoint, path, outtype="f16")
    shutil.rmtree(checkpoint)


def _config(n_bytes: int) -> dict[str, Any]:
    width = 2048 if n_bytes >= 100 << 20 else 64
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "intermediate_size": 4 * width,
        "vocab_size": _VOCAB_SIZE if width > 64 else _SMALL_VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    whole = 2 * sum(prod(shape) for _, shape in _shapes(config))
    layer = 2 * sum(prod(shape) for name, shape in _shapes(config) if ".layers." in name)
    config["num_hidden_layers"] = 1 + max(0, -(-(n_bytes - whole) // layer))  # rounded up
    return config


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (width,)
        for part in "qkvo":
            yield f"{name}.self_attn.{part}_proj.weight", (width, width)
        yield f"{name}.post_attention_layernorm.weight", (width,)
        yield f"{name}.mlp.gate_proj.weight", (ffn, width)
        yield f"{name}.mlp.up_proj.weight", (ffn, width)
        yield f"{name}.mlp.down_proj.weight", (width, ffn)
    yield "model.norm.weight", (width,)


def _shards(shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        if held + 2 * prod(shape) > _SHARD_BYTES and shards[-1]:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += 2 * prod(shape)
    return shards


def _tokenizer(size: int) -> dict[str, Any]:
    vocabulary = synthetic_vocabulary(size)
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    merges = [merge.split(" ") for merge in vocabulary.merges]
    model = {"type": "BPE", "vocab": ids, "merges": merges}
    sides = {"pre_tokenizer": step, "decoder": step}
    return {"version": "1.0", "added_tokens": [], **sides, "model": model}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
