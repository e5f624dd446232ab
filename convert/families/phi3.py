"""Phi-3, Phi-3.5 and Phi-4: fused projections, rotation of a part of each head, LongRoPE."""

from __future__ import annotations

from collections.abc import Iterator

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families import steps
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_longrope, longrope_factors, rope_settings
from specrun.convert.gguf import Metadata


def _rotated(config: JsonObject) -> int:
    """Return how many dimensions of each head are rotated."""
    rope, _ = rope_settings(config)
    part = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    width = steps.head_width(config)
    rotated = int(width * part)
    if not 2 <= rotated <= width or rotated % 2:
        raise config.unsupported(f"rotates {rotated} of {width} dimensions of a head")
    return rotated


def _describe(config: JsonObject, metadata: Metadata) -> None:
    steps.require(config, "hidden_act", "silu")
    steps.require(config, "attention_bias", False)
    steps.require_square_attention(config)
    # llama.cpp's Phi-3 attends to everything, whatever window the file states.
    steps.describe_decoder(config, metadata, "phi3", window=steps.stated_window(config))
    describe_longrope(config, metadata, "phi3", _rotated(config))


def _rules(config: JsonObject) -> Iterator[TensorRule]:
    width, ffn = config.count("hidden_size"), config.count("intermediate_size")
    heads = config.count("num_attention_heads") + 2 * steps.kv_heads(config)
    yield from steps.embeddings(config)
    yield from longrope_factors(config, _rotated(config))
    for layer in range(config.count("num_hidden_layers")):
        for ours, theirs, shape in (
            ("attn_qkv", "self_attn.qkv_proj", (heads * steps.head_width(config), width)),
            ("attn_output", "self_attn.o_proj", (width, width)),
            ("ffn_up", "mlp.gate_up_proj", (2 * ffn, width)),  # gate first, then up, in both
            ("ffn_down", "mlp.down_proj", (width, ffn)),
        ):
            source = f"model.layers.{layer}.{theirs}"
            yield from steps.with_bias(f"blk.{layer}.{ours}", source, shape, bias=False)
        yield from steps.norms(config, layer)


FAMILIES = (Family(("Phi3ForCausalLM",), "phi3", _describe, _rules),)
