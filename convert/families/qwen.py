"""Qwen 2 and 2.5 (biases on queries, keys and values) and Qwen 3 (norms on queries and keys).

Qwen 3 has a kind with experts, too (Qwen3-30B-A3B).
"""

from __future__ import annotations

from collections.abc import Iterator

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families import steps
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_rope
from specrun.convert.families.steps import require
from specrun.convert.gguf import Metadata


def _window(config: JsonObject) -> int | None:
    """Return the sliding window, if any layer has it: llama.cpp's Qwen attends to everything."""
    if not config.flag("use_sliding_window", False):
        return None
    if "layer_types" in config:
        slides = "sliding_attention" in config.items("layer_types")
    else:
        # The layers from max_window_layers on slide; 0 is a layer like others, as a token id is.
        first = config.token("max_window_layers")
        slides = first is None or first < config.count("num_hidden_layers")
    return steps.stated_window(config) if slides else None


def _describe_qwen2(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    steps.require_square_attention(config)
    steps.describe_decoder(config, metadata, "qwen2", window=_window(config))
    describe_rope(config, metadata, "qwen2")


def _qwen2_rules(config: JsonObject) -> Iterator[TensorRule]:
    return steps.decoder_rules(config, bias=True, output_bias=False)


def _describe_qwen3(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    require(config, "attention_bias", False)
    steps.describe_decoder(config, metadata, "qwen3", window=_window(config), key_length=True)
    describe_rope(config, metadata, "qwen3")


def _qwen3_rules(config: JsonObject) -> Iterator[TensorRule]:
    return steps.decoder_rules(config, normed_heads=True)


def _describe_qwen3moe(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    require(config, "attention_bias", False)
    # llama.cpp has experts in all layers, whose shares sum to 1.
    require(config, "decoder_sparse_step", 1)
    require(config, "mlp_only_layers", [])
    if not config.flag("norm_topk_prob", False):
        raise config.unsupported("has norm_topk_prob = False: llama.cpp has only True")
    steps.describe_decoder(config, metadata, "qwen3moe", window=_window(config), key_length=True)
    steps.describe_experts(config, metadata, "qwen3moe")
    wide = config.count("moe_intermediate_size")
    metadata.count("qwen3moe.expert_feed_forward_length", wide)
    describe_rope(config, metadata, "qwen3moe")


def _qwen3moe_rules(config: JsonObject) -> Iterator[TensorRule]:
    return steps.decoder_rules(config, normed_heads=True, network=_qwen3moe_experts)


def _qwen3moe_experts(config: JsonObject, layer: int) -> Iterator[TensorRule]:
    block = f"model.layers.{layer}.mlp"
    sizes = config.count("moe_intermediate_size"), config.count("hidden_size")
    all_sizes = steps.n_experts(config), *sizes
    return steps.expert_rules(layer, f"{block}.gate", f"{block}.experts", config, all_sizes)


FAMILIES = (
    Family(("Qwen2ForCausalLM",), "qwen2", _describe_qwen2, _qwen2_rules),
    Family(("Qwen3ForCausalLM",), "qwen3", _describe_qwen3, _qwen3_rules),
    Family(("Qwen3MoeForCausalLM",), "qwen3moe", _describe_qwen3moe, _qwen3moe_rules),
)
