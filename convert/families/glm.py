"""GLM 4: dense with norms before and after each half of a layer, and with experts (4.5 to 4.7).

The experts' checkpoints have a block behind the layers that predicts a token further (NextN).
"""

from __future__ import annotations

from collections.abc import Iterator

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families import steps
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.families.rope import rope_base, rope_settings
from specrun.convert.families.steps import require, weight
from specrun.convert.gguf import Metadata

_DENSE_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_BLOCK = {"enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}
_TOKENS = {"embed_tokens": "embed_tokens", "shared_head_head": "shared_head.head"}
_SIGMOID = 2  # of llama.cpp's gating functions


def _describe(config: JsonObject, metadata: Metadata, prefix: str = "glm4") -> None:
    require(config, "hidden_act", "silu")
    steps.describe_decoder(config, metadata, prefix, key_length=True)
    rope, kind = rope_settings(config)
    if kind != "default":
        raise rope.unsupported(f"is {kind!r}: only default can be read for {prefix}")
    part = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 0.5))
    metadata.count(f"{prefix}.rope.dimension_count", int(steps.head_width(config) * part))
    metadata.number(f"{prefix}.rope.freq_base", rope_base(config, rope))


def _rules(config: JsonObject) -> Iterator[TensorRule]:
    bias = config.flag("attention_bias", True)
    return steps.decoder_rules(
        config, bias=bias, output_bias=False, names=_DENSE_NORMS, network=_fused
    )


def _fused(config: JsonObject, layer: int) -> Iterator[TensorRule]:
    """Yield a network whose gate lies above its up, in both formats."""
    wide, hidden = config.count("intermediate_size"), config.count("hidden_size")
    ours, theirs = f"blk.{layer}.ffn_", f"model.layers.{layer}.mlp."
    yield weight(f"{ours}up", f"{theirs}gate_up_proj", (2 * wide, hidden))
    yield weight(f"{ours}down", f"{theirs}down_proj", (hidden, wide))


def _describe_moe(config: JsonObject, metadata: Metadata) -> None:
    prefix = "glm4moe"
    _describe(config, metadata, prefix)
    for key in ("n_group", "topk_group"):
        require(config, key, 1)
    steps.describe_experts(config, metadata, prefix)
    metadata.counts(
        prefix,
        expert_feed_forward_length=config.count("moe_intermediate_size"),
        expert_shared_count=config.count("n_shared_experts", 1),
        leading_dense_block_count=config.token("first_k_dense_replace") or 0,
        expert_gating_func=_SIGMOID,
    )
    scale = config.number("routed_scaling_factor", 1.0)
    metadata.number(f"{prefix}.expert_weights_scale", scale)
    metadata.flag(f"{prefix}.expert_weights_norm", config.flag("norm_topk_prob", True))
    if blocks := _n_blocks(config):
        layers = config.count("num_hidden_layers")
        metadata.counts(prefix, block_count=layers + blocks, nextn_predict_layers=blocks)


def _n_blocks(config: JsonObject) -> int:
    """Return how many NextN blocks there are (`text_part` counts those of a checkpoint)."""
    return config.token(steps.NEXTN_BLOCKS) or 0


def _moe_rules(config: JsonObject) -> Iterator[TensorRule]:
    layers, blocks = config.count("num_hidden_layers"), _n_blocks(config)
    values = {**config.values, "num_hidden_layers": layers + blocks}
    yield from steps.decoder_rules(
        JsonObject(values, config.shown),
        bias=config.flag("attention_bias", False),
        output_bias=False,
        normed_heads=config.flag("use_qk_norm", False),
        names=_NORMS,
        network=_experts,
    )
    hidden, size = config.count("hidden_size"), config.count("vocab_size")
    for layer in range(layers, layers + blocks):
        ours, theirs = f"blk.{layer}.nextn.", f"model.layers.{layer}."
        yield weight(f"{ours}eh_proj", f"{theirs}eh_proj", (hidden, 2 * hidden))
        for name, source in _BLOCK.items():
            yield weight(f"{ours}{name}", f"{theirs}{source}", (hidden,))
        if config.flag(steps.NEXTN_TOKENS, False):
            for name, source in _TOKENS.items():
                yield weight(f"{ours}{name}", f"{theirs}{source}", (size, hidden))


def _experts(config: JsonObject, layer: int) -> Iterator[TensorRule]:
    """Yield a layer's experts, with those that are always used; the first layers are dense."""
    hidden, wide = config.count("hidden_size"), config.count("moe_intermediate_size")
    ours, theirs = f"blk.{layer}.", f"model.layers.{layer}.mlp."
    if layer < (config.token("first_k_dense_replace") or 0):
        yield from steps.gated(f"{ours}ffn_", "", theirs, config.count("intermediate_size"), hidden)
        return
    n = steps.n_experts(config)
    sizes = n, wide, hidden
    yield from steps.expert_rules(layer, f"{theirs}gate", f"{theirs}experts", config, sizes)
    yield TensorRule(f"{ours}exp_probs_b.bias", (f"{theirs}gate.e_score_correction_bias",), (n,))
    shared = config.count("n_shared_experts", 1) * wide
    yield from steps.gated(f"{ours}ffn_", "_shexp", f"{theirs}shared_experts.", shared, hidden)


FAMILIES = (
    Family(("Glm4ForCausalLM",), "glm4", _describe, _rules),
    Family(("Glm4MoeForCausalLM",), "glm4moe", _describe_moe, _moe_rules),
)
