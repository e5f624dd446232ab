"""Steps that families share: the keys of a decoder-only transformer, sliding windows, tensor
rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Array, TensorRule, unchanged
from specrun.convert.gguf import Metadata


def kv_heads(config: JsonObject) -> int:
    """Return the number of key-value heads."""
    return config.count("num_key_value_heads", config.count("num_attention_heads"))


def head_width(config: JsonObject) -> int:
    """Return the width of one attention head."""
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if "head_dim" not in config and width % heads:
        raise MalformedFileError(
            f"{config.shown} has hidden_size {width}, which is not divisible by {heads} heads"
        )
    if heads % kv_heads(config):
        raise MalformedFileError(
            f"{config.shown} has {heads} heads over {kv_heads(config)} key-value heads"
        )
    wide = config.count("head_dim", max(1, width // heads))
    if wide % 2:
        raise MalformedFileError(f"{config.shown} has heads of width {wide}, which must be even")
    return wide


def require(config: JsonObject, key: str, wanted: object) -> None:
    """Raise UnsupportedModelError unless `key` is absent or `wanted`, all that llama.cpp knows here."""
    if key in config and config.any(key) != wanted:
        raise UnsupportedModelError(
            f"{config.shown} has {key} = {config.any(key)!r}: llama.cpp has only {wanted!r} for "
            "this family"
        )


def require_square_attention(config: JsonObject) -> None:
    """Raise UnsupportedModelError unless the heads together are as wide as the hidden states."""
    inner, width = (
        config.count("num_attention_heads") * head_width(config),
        config.count("hidden_size"),
    )
    if inner != width:
        raise UnsupportedModelError(
            f"{config.shown} has heads of {inner} numbers together and hidden states of {width}: "
            "llama.cpp has only equal ones for this family"
        )


def describe_decoder(
    config: JsonObject,
    metadata: Metadata,
    prefix: str,
    *,
    window: int | None = None,
    key_length: bool = False,
) -> None:
    """Write the keys of a decoder with RMS norms under `prefix`, llama.cpp's architecture.

    `window` is a sliding window that llama.cpp does not have for the architecture: within it the
    numbers are the same, so it becomes the context length. `key_length` writes the width of heads
    even where it follows.
    """
    heads, width = config.count("num_attention_heads"), head_width(config)
    context = config.count("max_position_embeddings")
    metadata.count(f"{prefix}.vocab_size", config.count("vocab_size"))
    metadata.count(f"{prefix}.context_length", context if window is None else min(context, window))
    metadata.count(f"{prefix}.embedding_length", config.count("hidden_size"))
    metadata.count(f"{prefix}.block_count", config.count("num_hidden_layers"))
    metadata.count(f"{prefix}.feed_forward_length", config.count("intermediate_size"))
    metadata.count(f"{prefix}.attention.head_count", heads)
    metadata.count(f"{prefix}.attention.head_count_kv", kv_heads(config))
    metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon", config.number("rms_norm_eps"))
    if key_length or heads * width != config.count("hidden_size"):
        metadata.count(f"{prefix}.attention.key_length", width)
        metadata.count(f"{prefix}.attention.value_length", width)


def interleave_halves(array: Array, heads: int) -> Array:
    """Reorder the rows of a query or key projection, per head.

    Hugging Face rotates row i of a head with row i + half, llama.cpp row 2i with row 2i + 1.
    """
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def plus_one(array: Array) -> Array:
    """Return a norm's weights as factors, where the checkpoint stores what is added to 1."""
    return array.astype(np.float32, copy=False) + np.float32(1.0)


def with_bias(
    name: str, source: str, shape: tuple[int, int], *, bias: bool, rope_heads: int = 0
) -> Iterator[TensorRule]:
    """Yield the rules of a matrix and its bias; `rope_heads` > 0 reorders rows for llama.cpp's rope."""
    change = functools.partial(interleave_halves, heads=rope_heads) if rope_heads else unchanged
    yield TensorRule(f"{name}.weight", (f"{source}.weight",), shape, change, moves_only=True)
    if bias:
        yield TensorRule(f"{name}.bias", (f"{source}.bias",), shape[:1], change, moves_only=True)


def embeddings(
    config: JsonObject, *, tied: bool = False, change: Callable[[Array], Array] = unchanged
) -> Iterator[TensorRule]:
    """Yield the rules of the embeddings, the output head and the last norm.

    `tied` is what the family takes an absent tie_word_embeddings for, `change` what happens to the
    norm.
    """
    vocab, width = config.count("vocab_size"), config.count("hidden_size")
    yield TensorRule("token_embd.weight", ("model.embed_tokens.weight",), (vocab, width))
    if not config.flag("tie_word_embeddings", tied):
        yield TensorRule("output.weight", ("lm_head.weight",), (vocab, width))
    yield TensorRule("output_norm.weight", ("model.norm.weight",), (width,), change)


def attention(
    config: JsonObject,
    layer: int,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    interleaved: bool = False,
) -> Iterator[TensorRule]:
    """Yield the rules of a layer's four projections.

    `bias` is of queries, keys and values, and of the output unless `output_bias` says otherwise;
    `interleaved` where llama.cpp rotates neighbours instead of halves.
    """
    width, heads, shared = (
        config.count("hidden_size"),
        config.count("num_attention_heads"),
        kv_heads(config),
    )
    inner, kv_inner = heads * head_width(config), shared * head_width(config)
    block, source = f"blk.{layer}", f"model.layers.{layer}.self_attn"
    queries, keys = (heads, shared) if interleaved else (0, 0)
    yield from with_bias(
        f"{block}.attn_q", f"{source}.q_proj", (inner, width), bias=bias, rope_heads=queries
    )
    yield from with_bias(
        f"{block}.attn_k", f"{source}.k_proj", (kv_inner, width), bias=bias, rope_heads=keys
    )
    yield from with_bias(f"{block}.attn_v", f"{source}.v_proj", (kv_inner, width), bias=bias)
    output_bias = bias if output_bias is None else output_bias
    yield from with_bias(
        f"{block}.attn_output", f"{source}.o_proj", (width, inner), bias=output_bias
    )


def gated_feed_forward(
    config: JsonObject, layer: int, *, bias: bool = False
) -> Iterator[TensorRule]:
    """Yield the rules of a layer's gate, up and down projections."""
    width, ffn = config.count("hidden_size"), config.count("intermediate_size")
    block, source = f"blk.{layer}", f"model.layers.{layer}.mlp"
    yield from with_bias(f"{block}.ffn_gate", f"{source}.gate_proj", (ffn, width), bias=bias)
    yield from with_bias(f"{block}.ffn_up", f"{source}.up_proj", (ffn, width), bias=bias)
    yield from with_bias(f"{block}.ffn_down", f"{source}.down_proj", (width, ffn), bias=bias)


def norms(
    config: JsonObject,
    layer: int,
    names: Mapping[str, str],
    change: Callable[[Array], Array] = unchanged,
) -> Iterator[TensorRule]:
    """Yield the rules of a layer's norms over hidden states, `names` from ours to the checkpoint's."""
    width = config.count("hidden_size")
    for ours, theirs in names.items():
        yield TensorRule(
            f"blk.{layer}.{ours}.weight",
            (f"model.layers.{layer}.{theirs}.weight",),
            (width,),
            change,
        )


def head_norms(
    config: JsonObject, layer: int, change: Callable[[Array], Array] = unchanged
) -> Iterator[TensorRule]:
    """Yield the rules of the norms over each head's queries and keys."""
    for part in ("q", "k"):
        source = f"model.layers.{layer}.self_attn.{part}_norm.weight"
        yield TensorRule(
            f"blk.{layer}.attn_{part}_norm.weight", (source,), (head_width(config),), change
        )
