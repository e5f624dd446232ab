"""Llama 1 to 3.x and what has exactly its shape: Vicuna, SmolLM 1 and 2, TinyLlama."""

from __future__ import annotations

from collections.abc import Iterator

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_rope, llama3_factors
from specrun.convert.families.steps import (
    attention,
    describe_decoder,
    embeddings,
    gated_feed_forward,
    norms,
    require,
)
from specrun.convert.gguf import Metadata

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def describe_llama(config: JsonObject, metadata: Metadata, *, window: int | None = None) -> None:
    """Write the keys of llama.cpp's architecture "llama"; `window` as in `describe_decoder`."""
    require(config, "hidden_act", "silu")
    require(config, "mlp_bias", False)
    describe_decoder(config, metadata, "llama", window=window)
    describe_rope(config, metadata, "llama", scalings=("linear", "llama3", "yarn"))


def llama_rules(config: JsonObject) -> Iterator[TensorRule]:
    """Yield the tensors of llama.cpp's architecture "llama"."""
    bias = config.flag("attention_bias", False)
    yield from embeddings(config)
    yield from llama3_factors(config)
    for layer in range(config.count("num_hidden_layers")):
        yield from attention(config, layer, bias=bias, interleaved=True)
        yield from gated_feed_forward(config, layer)
        yield from norms(config, layer, _NORMS)


FAMILY = Family(("LlamaForCausalLM", "LLaMAForCausalLM"), "llama", describe_llama, llama_rules)
"""The family of LlamaForCausalLM."""
