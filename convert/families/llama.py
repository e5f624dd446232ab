"""Llama 1 to 3.x, and what has exactly its shape."""

from __future__ import annotations

from collections.abc import Iterator

from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.steps import (
    describe_decoder,
    describe_rope,
    head_width,
    kv_heads,
    llama3_factors,
    require,
    with_bias,
)
from specrun.convert.json_file import JsonObject
from specrun.convert.metadata import Metadata

__all__ = ["FAMILY"]


def _describe(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    require(config, "mlp_bias", False)
    describe_decoder(config, metadata, "llama")
    describe_rope(config, metadata, "llama")


def _rules(config: JsonObject) -> Iterator[TensorRule]:
    vocab, width = config.count("vocab_size"), config.count("hidden_size")
    yield TensorRule("token_embd.weight", ("model.embed_tokens.weight",), (vocab, width))
    if not config.flag("tie_word_embeddings", False):
        yield TensorRule("output.weight", ("lm_head.weight",), (vocab, width))
    yield TensorRule("output_norm.weight", ("model.norm.weight",), (width,))
    yield from llama3_factors(config)
    for layer in range(config.count("num_hidden_layers")):
        yield from _layer(config, f"blk.{layer}", f"model.layers.{layer}")


def _layer(config: JsonObject, block: str, source: str) -> Iterator[TensorRule]:
    width, ffn = config.count("hidden_size"), config.count("intermediate_size")
    heads, shared = config.count("num_attention_heads"), kv_heads(config)
    inner, kv_inner = heads * head_width(config), shared * head_width(config)
    attention, bias = f"{source}.self_attn", config.flag("attention_bias", False)
    yield from with_bias(f"{block}.attn_q", f"{attention}.q_proj", (inner, width), bias=bias, rope_heads=heads)
    yield from with_bias(f"{block}.attn_k", f"{attention}.k_proj", (kv_inner, width), bias=bias, rope_heads=shared)
    yield from with_bias(f"{block}.attn_v", f"{attention}.v_proj", (kv_inner, width), bias=bias)
    yield from with_bias(f"{block}.attn_output", f"{attention}.o_proj", (width, inner), bias=bias)
    yield from with_bias(f"{block}.ffn_gate", f"{source}.mlp.gate_proj", (ffn, width), bias=False)
    yield from with_bias(f"{block}.ffn_up", f"{source}.mlp.up_proj", (ffn, width), bias=False)
    yield from with_bias(f"{block}.ffn_down", f"{source}.mlp.down_proj", (width, ffn), bias=False)
    yield TensorRule(f"{block}.attn_norm.weight", (f"{source}.input_layernorm.weight",), (width,))
    yield TensorRule(f"{block}.ffn_norm.weight", (f"{source}.post_attention_layernorm.weight",), (width,))


FAMILY = Family(("LlamaForCausalLM",), "llama", _describe, _rules)
"""The family of LlamaForCausalLM."""
