"""Gemma 2 and 3 (text): norms around each half of a layer, sliding windows in most layers, soft
caps."""

from __future__ import annotations

from collections.abc import Iterator

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_rope, rope_base, rope_settings
from specrun.convert.families.steps import (
    attention,
    describe_decoder,
    embeddings,
    gated_feed_forward,
    head_norms,
    head_width,
    norms,
    plus_one,
    require,
)
from specrun.convert.gguf import Metadata

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _describe_gemma2(config: JsonObject, metadata: Metadata) -> None:
    _describe_common(config, metadata, "gemma2", 46)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap not in config:
            raise UnsupportedModelError(
                f"{config.shown} has no {cap}, which llama.cpp always does for this family"
            )
        metadata.number(f"gemma2.{cap}", config.number(cap))
    describe_rope(config, metadata, "gemma2", scalings=())
    _describe_window(config, metadata, "gemma2", 2)


def _describe_gemma3(config: JsonObject, metadata: Metadata) -> None:
    _describe_common(config, metadata, "gemma3", 62)
    require(config, "attn_logit_softcapping", None)
    if "final_logit_softcapping" in config:
        metadata.number("gemma3.final_logit_softcapping", config.number("final_logit_softcapping"))
    _describe_gemma3_rope(config, metadata)
    _describe_window(config, metadata, "gemma3", config.count("sliding_window_pattern", 6))


def _describe_common(
    config: JsonObject, metadata: Metadata, prefix: str, layers_of_27b: int
) -> None:
    require(config, "hidden_activation", "gelu_pytorch_tanh")
    require(config, "attention_bias", False)
    require(config, "use_bidirectional_attention", False)
    require(config, "tie_word_embeddings", True)
    describe_decoder(config, metadata, prefix, key_length=True)
    # llama.cpp has the divisor of attention scores of the 27B models by their number of layers.
    scalar: float = head_width(config)
    if config.count("num_hidden_layers") == layers_of_27b:
        scalar = config.count("hidden_size") // config.count("num_attention_heads")
    if config.number("query_pre_attn_scalar", 256) != scalar:
        raise UnsupportedModelError(
            f"{config.shown} has query_pre_attn_scalar = "
            f"{config.number('query_pre_attn_scalar', 256):g}: "
            f"llama.cpp takes {scalar:g} for a model of this shape"
        )


def _describe_gemma3_rope(config: JsonObject, metadata: Metadata) -> None:
    rope, kind = rope_settings(config, "full_attention")
    if kind not in ("default", "linear"):
        raise UnsupportedModelError(
            f"{rope.shown} is {kind!r}: only default and linear can be converted for gemma3"
        )
    metadata.count("gemma3.rope.dimension_count", head_width(config))
    metadata.number("gemma3.rope.freq_base", rope_base(config, rope, 1_000_000.0))
    if kind == "linear":
        metadata.text("gemma3.rope.scaling.type", "linear")
        metadata.number("gemma3.rope.scaling.factor", rope.number("factor"))
    local = config.number("rope_local_base_freq", 10_000.0)
    if "rope_parameters" in config:
        near = config.object("rope_parameters").object("sliding_attention")
        require(near, "rope_type", "default")
        local = near.number("rope_theta", local)
    metadata.number("gemma3.rope.freq_base_swa", local)


def _describe_window(config: JsonObject, metadata: Metadata, prefix: str, pattern: int) -> None:
    """Write the window, and which layers slide where llama.cpp would assume others."""
    count = config.count("num_hidden_layers")
    slides = [(layer + 1) % pattern != 0 for layer in range(count)]
    if "layer_types" in config:
        slides = [kind == "sliding_attention" for kind in config.items("layer_types")]
        if len(slides) != count:
            raise MalformedFileError(
                f"{config.shown} has layer_types for {len(slides)} of {count} layers"
            )
    metadata.count(f"{prefix}.attention.sliding_window", config.count("sliding_window", 4096))
    usual = 2 if prefix == "gemma2" else 6
    if slides != [(layer + 1) % usual != 0 for layer in range(count)]:
        metadata.flags(f"{prefix}.attention.sliding_window_pattern", slides)


def _rules(config: JsonObject, *, normed_heads: bool) -> Iterator[TensorRule]:
    yield from embeddings(config, tied=True, change=plus_one)
    for layer in range(config.count("num_hidden_layers")):
        yield from attention(config, layer)
        if normed_heads:
            yield from head_norms(config, layer, plus_one)
        yield from gated_feed_forward(config, layer)
        yield from norms(config, layer, _NORMS, plus_one)


def _gemma2_rules(config: JsonObject) -> Iterator[TensorRule]:
    return _rules(config, normed_heads=False)


def _gemma3_rules(config: JsonObject) -> Iterator[TensorRule]:
    return _rules(config, normed_heads=True)


GEMMA2 = Family(("Gemma2ForCausalLM",), "gemma2", _describe_gemma2, _gemma2_rules)
"""The family of Gemma2ForCausalLM."""

GEMMA3 = Family(("Gemma3ForCausalLM",), "gemma3", _describe_gemma3, _gemma3_rules)
"""The family of Gemma3ForCausalLM."""
