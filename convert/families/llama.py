"""Llama 1 to 3.x and its relatives: Vicuna, SmolLM, TinyLlama; Mistral, Mixtral; SmolLM3.

llama.cpp runs Mistral 7B, Nemo and Small as a Llama, and Mixtral as one with experts. SmolLM3 is a
Llama of which every fourth layer has no rotary embedding (NoPE).
"""

from __future__ import annotations

from collections.abc import Iterator

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families import steps
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import describe_rope, llama3_factors
from specrun.convert.families.steps import require
from specrun.convert.gguf import Metadata


def _describe_llama(config: JsonObject, metadata: Metadata, window: int | None = None) -> None:
    require(config, "hidden_act", "silu")
    require(config, "mlp_bias", False)
    steps.describe_decoder(config, metadata, "llama", window=window)
    describe_rope(config, metadata, "llama", scalings=("linear", "llama3", "yarn"))


def _describe_mistral(config: JsonObject, metadata: Metadata) -> None:
    # llama.cpp's Llama attends to everything, Mistral 7B v0.1 to a window.
    _describe_llama(config, metadata, steps.stated_window(config))


def _llama_rules(config: JsonObject) -> Iterator[TensorRule]:
    bias = config.flag("attention_bias", False)
    factors = llama3_factors(config)
    return steps.decoder_rules(config, between=factors, bias=bias, interleaved=True)


def _describe_mixtral(config: JsonObject, metadata: Metadata) -> None:
    _describe_mistral(config, metadata)
    steps.describe_experts(config, metadata, "llama")


def _mixtral_rules(config: JsonObject) -> Iterator[TensorRule]:
    return steps.decoder_rules(config, interleaved=True, network=_mixtral_experts)


def _mixtral_experts(config: JsonObject, layer: int) -> Iterator[TensorRule]:
    block = f"model.layers.{layer}.block_sparse_moe"
    sizes = config.count("intermediate_size"), config.count("hidden_size")
    all_sizes = steps.n_experts(config), *sizes
    names = "w1", "w3", "w2"
    experts = f"{block}.experts"
    return steps.expert_rules(layer, f"{block}.gate", experts, config, all_sizes, names)


def _describe_smollm3(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    for key in ("mlp_bias", "attention_bias", "use_sliding_window"):
        require(config, key, False)
    require(config, "no_rope_layer_interval", 4)
    # 1 for layers with a rotary embedding: llama.cpp leaves it out in every fourth.
    usual = [int(layer % 4 != 3) for layer in range(config.count("num_hidden_layers"))]
    if "no_rope_layers" in config and config.items("no_rope_layers") != usual:
        raise config.unsupported("has no_rope_layers other than every fourth, all llama.cpp has")
    steps.describe_decoder(config, metadata, "smollm3")
    describe_rope(config, metadata, "smollm3")


def _smollm3_rules(config: JsonObject) -> Iterator[TensorRule]:
    return steps.decoder_rules(config, tied=True, interleaved=True)


FAMILIES = (
    Family(("LlamaForCausalLM", "LLaMAForCausalLM"), "llama", _describe_llama, _llama_rules),
    Family(("MistralForCausalLM",), "llama", _describe_mistral, _llama_rules),
    Family(("MixtralForCausalLM",), "llama", _describe_mixtral, _mixtral_rules),
    Family(("SmolLM3ForCausalLM",), "smollm3", _describe_smollm3, _smollm3_rules),
)
