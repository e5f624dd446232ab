"""Phi-3, Phi-3.5 and Phi-4: fused projections, rotation of a part of each head, LongRoPE."""

from __future__ import annotations

from collections.abc import Iterator

from specrun.bindings.errors import UnsupportedModelError
from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_longrope, longrope_factors, rope_settings
from specrun.convert.families.steps import (
    describe_decoder,
    embeddings,
    head_width,
    kv_heads,
    norms,
    require,
    require_square_attention,
    with_bias,
)
from specrun.convert.gguf import Metadata

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def _rotated(config: JsonObject) -> int:
    """How many dimensions of each head are rotated."""
    rope, _ = rope_settings(config)
    part = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotated = int(head_width(config) * part)
    if not 2 <= rotated <= head_width(config) or rotated % 2:
        raise UnsupportedModelError(
            f"{config.shown} rotates {rotated} of {head_width(config)} dimensions of a head"
        )
    return rotated


def _describe(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    require(config, "attention_bias", False)
    require_square_attention(config)
    # llama.cpp's Phi-3 attends to everything, whatever window the file states.
    window = config.count("sliding_window") if "sliding_window" in config else None
    describe_decoder(config, metadata, "phi3", window=window)
    describe_longrope(config, metadata, "phi3", _rotated(config))


def _rules(config: JsonObject) -> Iterator[TensorRule]:
    width, ffn, head = (
        config.count("hidden_size"),
        config.count("intermediate_size"),
        head_width(config),
    )
    fused = (config.count("num_attention_heads") + 2 * kv_heads(config)) * head
    yield from embeddings(config)
    yield from longrope_factors(config, _rotated(config))
    for layer in range(config.count("num_hidden_layers")):
        block, source = f"blk.{layer}", f"model.layers.{layer}"
        yield from with_bias(
            f"{block}.attn_qkv", f"{source}.self_attn.qkv_proj", (fused, width), bias=False
        )
        yield from with_bias(
            f"{block}.attn_output", f"{source}.self_attn.o_proj", (width, width), bias=False
        )
        # Gate first, then up, in both.
        yield from with_bias(
            f"{block}.ffn_up", f"{source}.mlp.gate_up_proj", (2 * ffn, width), bias=False
        )
        yield from with_bias(
            f"{block}.ffn_down", f"{source}.mlp.down_proj", (width, ffn), bias=False
        )
        yield from norms(config, layer, _NORMS)


FAMILY = Family(("Phi3ForCausalLM",), "phi3", _describe, _rules)
"""The family of Phi3ForCausalLM."""
