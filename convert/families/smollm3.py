"""SmolLM3: a Llama of which every fourth layer knows no positions (NoPE)."""

from __future__ import annotations

from collections.abc import Iterator

from specrun.bindings.errors import UnsupportedModelError
from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_rope
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


def _describe(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    require(config, "mlp_bias", False)
    require(config, "attention_bias", False)
    require(config, "use_sliding_window", False)
    require(config, "no_rope_layer_interval", 4)
    layers = range(1, config.count("num_hidden_layers") + 1)
    if "no_rope_layers" in config and config.items("no_rope_layers") != [
        int(layer % 4 != 0) for layer in layers
    ]:
        raise UnsupportedModelError(
            f"{config.shown} has no_rope_layers other than every fourth, which is what llama.cpp "
            "has for this family"
        )
    describe_decoder(config, metadata, "smollm3")
    describe_rope(config, metadata, "smollm3")


def _rules(config: JsonObject) -> Iterator[TensorRule]:
    yield from embeddings(config, tied=True)
    for layer in range(config.count("num_hidden_layers")):
        yield from attention(config, layer, interleaved=True)
        yield from gated_feed_forward(config, layer)
        yield from norms(config, layer, _NORMS)


FAMILY = Family(("SmolLM3ForCausalLM",), "smollm3", _describe, _rules)
"""The family of SmolLM3ForCausalLM."""
