"""Tiny Hugging Face checkpoints, written by hand: config, random weights, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.convert.random_model import synthetic_vocabulary
from specrun.convert.tokenizer import CONTROL

Tensors = dict[str, npt.NDArray[Any]]
CONTROLS = ("<|user|>", "<|end|>")
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def llama_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a small Llama."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 300,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": 299,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    return {**config, **changes}


def llama_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random weights in float32, named as Hugging Face names them."""
    source = np.random.default_rng(seed)
    width, ffn, heads = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    head = config.get("head_dim", width // heads)
    inner, kv = heads * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width)
    }
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, rows, columns in (
            ("q", inner, width),
            ("k", kv, width),
            ("v", kv, width),
            ("o", width, inner),
        ):
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (rows, columns)
            if config["attention_bias"]:
                shapes[f"{name}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{name}.mlp.gate_proj.weight"] = shapes[f"{name}.mlp.up_proj.weight"] = (ffn, width)
        shapes[f"{name}.mlp.down_proj.weight"] = (width, ffn)
        shapes[f"{name}.input_layernorm.weight"] = (width,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (width,)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        drawn = source.standard_normal(shape).astype(np.float32)
        tensors[name] = 1 + drawn / 8 if "norm" in name else drawn / np.float32(shape[-1] ** 0.5)
    return tensors


def safetensors_bytes(tensors: Tensors) -> bytes:
    """A safetensors file; arrays of uint16 are taken for bfloat16."""
    kinds = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {
            "dtype": kinds[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [len(data), end],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tokenizer_files(size: int, **changes: Any) -> dict[str, Any]:
    """The files of a byte-level BPE tokenizer with `size` tokens, the last two of them control
    tokens."""
    vocabulary = synthetic_vocabulary(size, controls=CONTROLS)
    added = [
        {"id": token, "content": text, "special": True, "normalized": False}
        for token, text in enumerate(vocabulary.tokens)
        if vocabulary.types[token] == CONTROL
    ]
    for entry in added:
        entry.update(single_word=False, lstrip=False, rstrip=False)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: token for token, text in enumerate(vocabulary.tokens)},
        "merges": [merge.split(" ") for merge in vocabulary.merges],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    settings = {
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    return {"tokenizer.json": {**tokenizer, **changes}, "tokenizer_config.json": settings}


def save_checkpoint(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: Tensors | None = None,
    **files: bytes | dict[str, Any] | None,
) -> Path:
    """Write a Hugging Face folder; files may be replaced by name, None leaves one out."""
    config = config or llama_config()
    folder.mkdir(exist_ok=True)
    # One token less than the matrix has rows, as in checkpoints that round the vocabulary up.
    contents: dict[str, Any] = {
        "config.json": config,
        **tokenizer_files(config["vocab_size"] - 1),
    }
    contents["model.safetensors"] = safetensors_bytes(
        llama_tensors(config) if tensors is None else tensors
    )
    contents.update(files)
    for name, content in contents.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / name).write_bytes(data)
    return folder
