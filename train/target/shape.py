"""A model's sizes, from config.json or a GGUF header, and the identity of its weights.

A head must fit its target's sizes; caches and checkpoints belong to the weights they were made of.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.gguf import ArrayValue, GGUFHeader, read_header
from specrun.convert.checkpoint import open_checkpoint
from specrun.convert.gguf import GGUFSource
from specrun.train.target.hf_model import read_config


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes; `n_heads` divides `hidden`, and `n_kv_heads` divides `n_heads`.

    `vocab_size` is 0 if config.json does not contain it.
    """

    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    feed_forward: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 2048
    vocab_size: int = 0

    @property
    def head_size(self) -> int:
        """The width of an attention head."""
        return self.hidden // self.n_heads

    @property
    def layer_numbers(self) -> int:
        """The numbers that a decoder layer keeps of each token for gradients, roughly."""
        return 24 * self.hidden + 6 * self.feed_forward

    def default_taps(self) -> tuple[int, int, int]:
        """Return the low, middle and high layer whose inputs EAGLE-3 reads by default.

        As EAGLE-3's reference: 2, n/2 and n-3. If these are not distinct, 1, n/2 and n-1.
        """
        n = self.n_layers
        usual = (2, n // 2, n - 3)
        return usual if 2 < n // 2 < n - 3 else (min(1, n - 1), n // 2, n - 1)

    def checked_taps(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers; raises OptionError for one that the model does not have."""
        outside = next((layer for layer in layers if not 0 <= layer < self.n_layers), None)
        if outside is not None:
            there = f"the target has layers 0 to {self.n_layers - 1}"
            raise OptionError(f"layer {outside} is to be read, and {there}")
        return layers

    def llama_config(self, **more: object) -> dict[str, Any]:
        """Return the config.json of a Llama of these sizes, and `more`, which overrides it."""
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "vocab_size": self.vocab_size,
            "torch_dtype": "float32",
            **more,
        }


def target_shape(folder: Path) -> ModelShape:
    """Return the sizes of a folder's model; raises UnsupportedModelError if one is missing."""
    config = read_config(folder)

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(
                f"config.json of {folder} has {value!r} as {name}: no head can be made for it"
            )
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    heads, kv_heads = _dividing_heads(hidden, heads, kv_heads)
    return ModelShape(
        hidden=hidden,
        n_layers=size("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        feed_forward=size("intermediate_size", 4 * hidden),
        rope_theta=_rope_theta(config),
        norm_eps=float(config.get("rms_norm_eps") or config.get("layer_norm_eps") or 1e-6),
        max_positions=size("max_position_embeddings", 2048),
        vocab_size=int(config.get("vocab_size", 0)),
    )


def file_shape(source: GGUFSource) -> ModelShape:
    """Return the sizes of the model in a GGUF file; raises UnsupportedModelError for missing ones.

    If layers differ, the largest number counts: heads are one layer of their own.
    """
    own, metadata = f"{source.header.architecture}.", source.header.metadata
    hidden, heads = source.count(f"{own}embedding_length"), _largest(source, "attention.head_count")
    heads, kv_heads = _dividing_heads(
        hidden, heads, _largest(source, "attention.head_count_kv", heads)
    )
    layers, nextn = source.count(f"{own}block_count"), metadata.get(f"{own}nextn_predict_layers")
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise source.unsupported("has no tensor token_embd.weight: no head can be made for it")
    epsilon = _number(source.header, "attention.layer_norm_epsilon", 1e-6)
    return ModelShape(
        hidden=hidden,
        n_layers=layers - (nextn if isinstance(nextn, int) else 0),
        n_heads=heads,
        n_kv_heads=kv_heads,
        feed_forward=_largest(source, "feed_forward_length", 4 * hidden),
        rope_theta=_number(source.header, "rope.freq_base", 10000.0),
        norm_eps=_number(source.header, "attention.layer_norm_rms_epsilon", epsilon),
        max_positions=source.count(f"{own}context_length"),
        vocab_size=embedding.shape[1],
    )


def _largest(source: GGUFSource, key: str, default: int | None = None) -> int:
    """Return a count of the architecture, the largest if each layer has its own."""
    name = f"{source.header.architecture}.{key}"
    value = source.header.metadata.get(name)
    if isinstance(value, ArrayValue):
        counts = [each for each in value.tolist() if isinstance(each, int) and each > 0]
        if counts:
            return max(counts)
    if value is None and default is not None:
        return default
    return source.count(name)


def _number(header: GGUFHeader, key: str, default: float) -> float:
    value = header.metadata.get(f"{header.architecture}.{key}")
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        return default
    return float(str(np.float32(value)))  # stored as float32: 1e-05, not 9.999999747378752e-06


def _dividing_heads(hidden: int, n_heads: int, n_kv_heads: int) -> tuple[int, int]:
    """Return the nearest numbers of heads below that divide: heads may have a width of their own.

    The width of a head is even, for rotary positions.
    """
    while hidden % n_heads or (hidden // n_heads) % 2:
        n_heads -= 1
    n_kv_heads = min(n_kv_heads, n_heads)
    while n_heads % n_kv_heads:
        n_kv_heads -= 1
    return n_heads, n_kv_heads


def _rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    for values in (config, rope, rope.get("full_attention") or {}):
        if isinstance(values, dict) and isinstance(values.get("rope_theta"), int | float):
            return float(values["rope_theta"])
    return 10000.0


def source_identity(path: Path) -> dict[str, Any]:
    """Return an identity of the weights in a file or folder: sizes and times of large files."""
    if path.is_file():
        stat, kind = path.stat(), read_header(path).architecture
        return {"source": [path.name, stat.st_size, stat.st_mtime_ns, kind]}
    found = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    weights = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in path.glob("*.safetensors")
    )
    return {"source": [found, *([*weight] for weight in weights)]}


def source_digest(path: Path) -> str:
    """Return 16 hexadecimal digits that stand for the weights."""
    return hashlib.sha256(json.dumps(source_identity(path)).encode()).hexdigest()[:16]


def checkpoint_size(folder: Path) -> int:
    """Return how many numbers the tensors of a Hugging Face folder hold; none is read."""
    return sum(math.prod(tensor.shape) for tensor in open_checkpoint(folder).tensors.values())
