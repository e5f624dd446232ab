"""Steps that families share: the keys of a decoder-only transformer, rope scaling, tensor rules."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import pi

import numpy as np

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.families.family import Array, TensorRule, unchanged
from specrun.convert.json_file import JsonObject
from specrun.convert.metadata import Metadata

__all__ = [
    "describe_decoder",
    "describe_rope",
    "head_width",
    "interleave_halves",
    "kv_heads",
    "llama3_factors",
    "require",
    "with_bias",
]


def kv_heads(config: JsonObject) -> int:
    """Return the number of key-value heads."""
    return config.count("num_key_value_heads", config.count("num_attention_heads"))


def head_width(config: JsonObject) -> int:
    """Return the width of one attention head."""
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if "head_dim" not in config and width % heads:
        raise MalformedFileError(f"{config.shown} has hidden_size {width}, which is not divisible by {heads} heads")
    if heads % kv_heads(config):
        raise MalformedFileError(f"{config.shown} has {heads} heads over {kv_heads(config)} key-value heads")
    wide = config.count("head_dim", max(1, width // heads))
    if wide % 2:
        raise MalformedFileError(f"{config.shown} has heads of width {wide}, which must be even")
    return wide


def require(config: JsonObject, key: str, wanted: object) -> None:
    """Raise UnsupportedModelError unless `key` is absent or has the one value llama.cpp knows here."""
    if key in config and config.any(key) != wanted:
        raise UnsupportedModelError(
            f"{config.shown} has {key} = {config.any(key)!r}: llama.cpp has only {wanted!r} for this family"
        )


def describe_decoder(config: JsonObject, metadata: Metadata, prefix: str) -> None:
    """Write the keys every decoder with RMS norms has; `prefix` is llama.cpp's name of the architecture."""
    heads, width = config.count("num_attention_heads"), head_width(config)
    metadata.count(f"{prefix}.vocab_size", config.count("vocab_size"))
    metadata.count(f"{prefix}.context_length", config.count("max_position_embeddings"))
    metadata.count(f"{prefix}.embedding_length", config.count("hidden_size"))
    metadata.count(f"{prefix}.block_count", config.count("num_hidden_layers"))
    metadata.count(f"{prefix}.feed_forward_length", config.count("intermediate_size"))
    metadata.count(f"{prefix}.attention.head_count", heads)
    metadata.count(f"{prefix}.attention.head_count_kv", kv_heads(config))
    metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon", config.number("rms_norm_eps"))
    if heads * width != config.count("hidden_size"):
        metadata.count(f"{prefix}.attention.key_length", width)
        metadata.count(f"{prefix}.attention.value_length", width)


def _rope(config: JsonObject) -> tuple[JsonObject, str]:
    # transformers 5 moved rope_theta and rope_scaling together into rope_parameters.
    rope = config.object("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    return rope, rope.text("rope_type", rope.text("type", "default"))


def describe_rope(config: JsonObject, metadata: Metadata, prefix: str) -> None:
    """Write the keys of the rotary embedding; raises UnsupportedModelError for an unknown scaling."""
    rope, kind = _rope(config)
    metadata.count(f"{prefix}.rope.dimension_count", head_width(config))
    base = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    metadata.number(f"{prefix}.rope.freq_base", base)
    if kind == "linear":
        metadata.text(f"{prefix}.rope.scaling.type", "linear")
        metadata.number(f"{prefix}.rope.scaling.factor", rope.number("factor"))
    elif kind not in ("default", "llama3"):
        raise UnsupportedModelError(f"{rope.shown} is {kind!r}: only default, linear and llama3 can be converted")


def llama3_factors(config: JsonObject) -> Iterator[TensorRule]:
    """Yield the tensor that divides each rope frequency, where the config asks for llama3's scaling."""
    rope, kind = _rope(config)
    if kind != "llama3":
        return
    width = head_width(config)
    base = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    trained = rope.count("original_max_position_embeddings")
    if high <= low:
        raise MalformedFileError(f"{rope.shown} has high_freq_factor {high:g}, not above low_freq_factor {low:g}")

    def compute() -> Array:
        wavelength = 2 * pi * base ** (np.arange(0, width, 2, dtype=np.float64) / width)
        # 1 where a wave fits the trained context `high` times, 0 where less than `low` times.
        kept = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
        return (1.0 / ((1.0 - kept) / factor + kept)).astype(np.float32)

    yield TensorRule("rope_freqs.weight", (), (width // 2,), compute)


def interleave_halves(array: Array, heads: int) -> Array:
    """Reorder the rows of a query or key projection, per head.

    Hugging Face rotates row i of a head with row i + half, llama.cpp row 2i with row 2i + 1.
    """
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def with_bias(
    name: str, source: str, shape: tuple[int, int], *, bias: bool, rope_heads: int = 0
) -> Iterator[TensorRule]:
    """Yield the rule of a matrix, and of its bias; `rope_heads` > 0 reorders rows for llama.cpp's rope."""
    change = functools.partial(interleave_halves, heads=rope_heads) if rope_heads else unchanged
    yield TensorRule(f"{name}.weight", (f"{source}.weight",), shape, change, moves_only=True)
    if bias:
        yield TensorRule(f"{name}.bias", (f"{source}.bias",), shape[:1], change, moves_only=True)
