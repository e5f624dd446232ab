"""Gemma 1 to 3 (text): norms less 1; from 2 on before and after each half of a layer, windows and
soft caps."""

from __future__ import annotations

from collections.abc import Iterator

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families import steps
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_rope
from specrun.convert.families.steps import plus_one, require
from specrun.convert.gguf import Metadata

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _describe_gemma(config: JsonObject, metadata: Metadata) -> None:
    # Early configs have "gelu" in hidden_act, and transformers runs the tanh form of it.
    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    if config.text(key, "gelu_pytorch_tanh") not in ("gelu", "gelu_pytorch_tanh"):
        raise config.unsupported(f"has {key} {config.text(key)!r}: llama.cpp has GELU (tanh)")
    require(config, "attention_bias", False)
    require(config, "use_bidirectional_attention", None)
    require(config, "tie_word_embeddings", True)
    steps.describe_decoder(config, metadata, "gemma", key_length=True)
    describe_rope(config, metadata, "gemma", scalings=())


def _gemma_rules(config: JsonObject) -> Iterator[TensorRule]:
    return steps.decoder_rules(config, tied=True, norm=plus_one)


def _describe_gemma2(config: JsonObject, metadata: Metadata) -> None:
    _describe_common(config, metadata, "gemma2", 46)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap not in config:
            raise config.unsupported(f"has no {cap}, which llama.cpp always does for this family")
        metadata.number(f"gemma2.{cap}", config.number(cap))
    describe_rope(config, metadata, "gemma2", scalings=())
    steps.describe_windows(config, metadata, "gemma2", 2, 2)


def _describe_gemma3(config: JsonObject, metadata: Metadata) -> None:
    _describe_common(config, metadata, "gemma3", 62)
    require(config, "attn_logit_softcapping", None)
    if "final_logit_softcapping" in config:
        metadata.number("gemma3.final_logit_softcapping", config.number("final_logit_softcapping"))
    layers = "full_attention"
    describe_rope(config, metadata, "gemma3", scalings=("linear",), layers=layers, base=1e6)
    # The layers with a window rotate faster, and unscaled.
    local = config.number("rope_local_base_freq", 10_000.0)
    if "rope_parameters" in config:
        near = config.object("rope_parameters").object("sliding_attention")
        require(near, "rope_type", "default")
        local = near.number("rope_theta", local)
    metadata.number("gemma3.rope.freq_base_swa", local)
    steps.describe_windows(config, metadata, "gemma3", config.count("sliding_window_pattern", 6), 6)


def _describe_common(config: JsonObject, metadata: Metadata, prefix: str, layers_27b: int) -> None:
    require(config, "hidden_activation", "gelu_pytorch_tanh")
    require(config, "attention_bias", False)
    require(config, "use_bidirectional_attention", False)
    require(config, "tie_word_embeddings", True)
    steps.describe_decoder(config, metadata, prefix, key_length=True)
    # llama.cpp has the divisor of attention scores of the 27B models by their number of layers.
    scalar: float = steps.head_width(config)
    if config.count("num_hidden_layers") == layers_27b:
        scalar = config.count("hidden_size") // config.count("num_attention_heads")
    stated = config.number("query_pre_attn_scalar", 256)
    if stated != scalar:
        raise config.unsupported(
            f"has query_pre_attn_scalar = {stated:g}: llama.cpp takes {scalar:g} "
            "for a model of this shape"
        )


def _gemma2_rules(config: JsonObject, *, normed: bool = False) -> Iterator[TensorRule]:
    return steps.decoder_rules(config, tied=True, norm=plus_one, names=_NORMS, normed_heads=normed)


def _gemma3_rules(config: JsonObject) -> Iterator[TensorRule]:
    return _gemma2_rules(config, normed=True)


FAMILIES = (
    Family(("GemmaForCausalLM",), "gemma", _describe_gemma, _gemma_rules),
    Family(("Gemma2ForCausalLM",), "gemma2", _describe_gemma2, _gemma2_rules),
    Family(("Gemma3ForCausalLM",), "gemma3", _describe_gemma3, _gemma3_rules),
)
