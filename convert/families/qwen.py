"""Qwen 2 and 2.5 (biases on queries, keys and values) and Qwen 3 (norms on queries and keys
instead)."""

from __future__ import annotations

from collections.abc import Iterator

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_rope
from specrun.convert.families.steps import (
    attention,
    describe_decoder,
    embeddings,
    gated_feed_forward,
    head_norms,
    norms,
    require,
    require_square_attention,
)
from specrun.convert.gguf import Metadata

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def _window(config: JsonObject) -> int | None:
    """The sliding window, if any layer has it: llama.cpp's Qwen attends to everything."""
    if not config.flag("use_sliding_window", False) or "sliding_window" not in config:
        return None
    layers = config.count("num_hidden_layers")
    if "layer_types" in config:
        slides = "sliding_attention" in config.items("layer_types")
    else:
        first = config.token("max_window_layers")
        slides = first is None or first < layers
    return config.count("sliding_window") if slides else None


def _describe_qwen2(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    require_square_attention(config)
    describe_decoder(config, metadata, "qwen2", window=_window(config))
    describe_rope(config, metadata, "qwen2")


def _qwen2_rules(config: JsonObject) -> Iterator[TensorRule]:
    yield from embeddings(config)
    for layer in range(config.count("num_hidden_layers")):
        yield from attention(config, layer, bias=True, output_bias=False)
        yield from gated_feed_forward(config, layer)
        yield from norms(config, layer, _NORMS)


def _describe_qwen3(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    require(config, "attention_bias", False)
    describe_decoder(config, metadata, "qwen3", window=_window(config), key_length=True)
    describe_rope(config, metadata, "qwen3")


def _qwen3_rules(config: JsonObject) -> Iterator[TensorRule]:
    yield from embeddings(config)
    for layer in range(config.count("num_hidden_layers")):
        yield from attention(config, layer)
        yield from head_norms(config, layer)
        yield from gated_feed_forward(config, layer)
        yield from norms(config, layer, _NORMS)


QWEN2 = Family(("Qwen2ForCausalLM",), "qwen2", _describe_qwen2, _qwen2_rules)
"""The family of Qwen2ForCausalLM."""

QWEN3 = Family(("Qwen3ForCausalLM",), "qwen3", _describe_qwen3, _qwen3_rules)
"""The family of Qwen3ForCausalLM."""
