"""Gemma 4 (text) and its assistants: layers with a window and a narrow head, others with neither.

Layers may lack values of their own (they take keys), take keys and values of earlier layers, have
experts beside the network, or an embedding for each layer. An assistant's layers take all keys and
values from the model that it drafts for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families import steps
from specrun.convert.families.family import Array, Family, TensorRule
from specrun.convert.families.steps import require, weight
from specrun.convert.gguf import Metadata

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NORMS = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
}
_UNROTATED = 1e30  # the divisor of a frequency whose pair stays as it is
_BOTH = ("sliding_attention", "full_attention")
_BACKBONE = "backbone_hidden_size"


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer: its heads' width, how many keys it has (0: another layer's), and its network."""

    has_window: bool
    head: int
    n_keys: int
    has_values: bool
    ffn: int


def _layers(config: JsonObject) -> list[_Layer]:
    count, kinds = config.count("num_hidden_layers"), config.items("layer_types")
    if not kinds:
        kinds = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(count)]
    if len(kinds) != count:
        raise config.malformed(f"has layer_types for {len(kinds)} of {count} layers")
    if kinds[-1] != "full_attention":
        raise config.unsupported("has a window in its last layer, which must have none")
    # transformers 5 writes the full layers' own settings for each of them.
    stated = config.object("per_layer_config").object(str(kinds.index("full_attention")))
    head = stated.count("head_dim", config.count("global_head_dim", 512))
    shares_values = config.flag("attention_k_eq_v", False)
    narrow = config.count("num_key_value_heads")
    wide = narrow
    if "num_key_value_heads" in stated:
        wide = stated.count("num_key_value_heads")
    elif shares_values and "num_global_key_value_heads" in config:
        wide = config.count("num_global_key_value_heads")
    ffn, n_own = config.count("intermediate_size"), count - _n_shared(config)
    # llama.cpp shares those of the last two layers that have some, one of each kind.
    if 0 < n_own < count and kinds[max(0, n_own - 2) : n_own] != [*_BOTH]:
        raise config.unsupported("shares keys of other layers than one with a window and the next")
    double = config.flag("use_double_wide_mlp", False)
    return [
        _Layer(
            has_window := kind == "sliding_attention",
            config.count("head_dim") if has_window else head,
            narrow if has_window else wide,
            has_values=layer < n_own and (has_window or not shares_values),
            ffn=ffn * (2 if double and layer >= n_own else 1),
        )
        for layer, kind in enumerate(kinds)
    ]


def _n_shared(config: JsonObject) -> int:
    """Return how many of the last layers take keys and values of others; 0 is a count, too."""
    return config.token("num_kv_shared_layers") or 0


def _describe(config: JsonObject, metadata: Metadata, prefix: str = "gemma4") -> None:
    require(config, "hidden_activation", "gelu_pytorch_tanh")
    require(config, "attention_bias", False)
    require(config, "tie_word_embeddings", True)
    if config.any("use_bidirectional_attention") not in (None, False, "vision"):
        raise config.unsupported("attends in both directions, which llama.cpp does not to text")
    layers = _layers(config)
    narrow, wide = config.count("head_dim"), layers[-1].head
    steps.describe_decoder(config, metadata, prefix, key_length=True)
    metadata.counts(f"{prefix}.attention", key_length=wide, value_length=wide)
    metadata.counts(f"{prefix}.attention", key_length_swa=narrow, value_length_swa=narrow)
    metadata.integers(f"{prefix}.attention.head_count_kv", [layer.n_keys for layer in layers])
    metadata.integers(f"{prefix}.feed_forward_length", [layer.ffn for layer in layers])
    metadata.count(f"{prefix}.attention.shared_kv_layers", _n_shared(config))
    metadata.count(f"{prefix}.embedding_length_per_layer_input", _per_layer(config))
    metadata.count(f"{prefix}.attention.sliding_window", config.count("sliding_window"))
    windows = [layer.has_window for layer in layers]
    metadata.flags(f"{prefix}.attention.sliding_window_pattern", windows)
    rope = config.object("rope_parameters")
    near, far = rope.object("sliding_attention"), rope.object("full_attention")
    require(near, "rope_type", "default")
    require(far, "rope_type", "proportional")
    metadata.number(f"{prefix}.rope.freq_base", far.number("rope_theta", 1e6))
    metadata.number(f"{prefix}.rope.freq_base_swa", near.number("rope_theta", 1e4))
    metadata.counts(f"{prefix}.rope", dimension_count=wide, dimension_count_swa=narrow)
    if "final_logit_softcapping" in config:
        cap = config.number("final_logit_softcapping")
        metadata.number(f"{prefix}.final_logit_softcapping", cap)
    if config.flag("enable_moe_block", False):
        metadata.count(f"{prefix}.expert_count", steps.n_experts(config))
        metadata.count(f"{prefix}.expert_used_count", config.count("top_k_experts"))
        wide = config.count("moe_intermediate_size")
        metadata.count(f"{prefix}.expert_feed_forward_length", wide)


def _per_layer(config: JsonObject) -> int:
    """Return the width of the embeddings of each layer, 0 without any."""
    return config.token("hidden_size_per_layer_input") or 0


def _rules(config: JsonObject) -> Iterator[TensorRule]:
    yield from steps.embeddings(config, tied=True)
    yield _unrotated(config)
    own, hidden = _per_layer(config), config.count("hidden_size")
    if own:
        size, whole = config.count("vocab_size"), config.count("num_hidden_layers") * own
        require(config, "vocab_size_per_layer_input", size)
        yield weight("per_layer_token_embd", "model.embed_tokens_per_layer", (size, whole))
        projection = "model.per_layer_model_projection"
        yield weight("per_layer_model_proj", projection, (whole, hidden))
        yield weight("per_layer_proj_norm", "model.per_layer_projection_norm", (own,))
    for number, layer in enumerate(_layers(config)):
        yield from _layer_rules(config, number, layer)


def _layer_rules(config: JsonObject, number: int, layer: _Layer) -> Iterator[TensorRule]:
    ours, theirs = f"blk.{number}.", f"model.layers.{number}."
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads") * layer.head
    attention, keys = f"{theirs}self_attn.", layer.n_keys * layer.head
    has_keys = number < config.count("num_hidden_layers") - _n_shared(config)
    parts = [("q", heads)] + [("k", keys)] * has_keys + [("v", keys)] * layer.has_values
    for part, rows in parts:
        yield weight(f"{ours}attn_{part}", f"{attention}{part}_proj", (rows, hidden))
    for part in ("q", "k") if has_keys else ("q",):
        yield weight(f"{ours}attn_{part}_norm", f"{attention}{part}_norm", (layer.head,))
    yield weight(f"{ours}attn_output", f"{attention}o_proj", (hidden, heads))
    yield from steps.gated(f"{ours}ffn_", "", f"{theirs}mlp.", layer.ffn, hidden)
    yield from steps.norms(config, number, _NORMS)
    yield TensorRule(f"{ours}layer_output_scale.weight", (f"{theirs}layer_scalar",), (1,))
    if own := _per_layer(config):
        yield weight(f"{ours}inp_gate", f"{theirs}per_layer_input_gate", (own, hidden))
        yield weight(f"{ours}proj", f"{theirs}per_layer_projection", (hidden, own))
        yield weight(f"{ours}post_norm", f"{theirs}post_per_layer_input_norm", (hidden,))
    if config.flag("enable_moe_block", False):
        yield from _experts(config, ours, theirs)
        yield from steps.norms(config, number, _EXPERT_NORMS)


def _experts(config: JsonObject, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Yield a router with its scales, and experts in two tensors, gates before ups."""
    n, hidden = steps.n_experts(config), config.count("hidden_size")
    wide, router = config.count("moe_intermediate_size"), f"{theirs}router."
    scales = f"{ours}ffn_down_exps.scale"
    gate = f"{ours}ffn_gate_inp."
    yield TensorRule(f"{gate}weight", (f"{router}proj.weight",), (n, hidden), keep_f32=True)
    yield TensorRule(f"{gate}scale", (f"{router}scale",), (hidden,))
    yield TensorRule(scales, (f"{router}per_expert_scale",), (n,))
    yield from steps.fused_experts(f"{ours}ffn_", f"{theirs}experts.", (n, wide, hidden))


def _unrotated(config: JsonObject) -> TensorRule:
    """Return the divisors of frequencies in full layers, which rotate a part of their pairs."""
    far = config.object("rope_parameters").object("full_attention")
    head = _layers(config)[-1].head
    rotated = int(far.number("partial_rotary_factor", 0.25) * head // 2)
    numbers = np.full(head // 2, _UNROTATED, np.float32)
    numbers[:rotated] = 1.0
    return TensorRule("rope_freqs.weight", (), numbers.shape, functools.partial(_copy, numbers))


def _copy(numbers: Array) -> Array:
    return numbers.copy()


def _unread(config: JsonObject) -> tuple[str, ...]:
    """Return tensors that checkpoints have of layers which take other layers' keys and values."""
    count = config.count("num_hidden_layers")
    layers = range(count - _n_shared(config), count)
    names = "k_proj.", "v_proj.", "k_norm.", "v_norm."
    return tuple(f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in names)


# -- assistants ------------------------------------------------------------------------------------


def _describe_assistant(config: JsonObject, metadata: Metadata) -> None:
    prefix = "gemma4-assistant"
    for key in ("enable_moe_block", "use_double_wide_mlp"):
        require(config, key, False)
    _describe(_sharing(config), metadata, prefix)
    metadata.counts(
        prefix,
        embedding_length_out=config.count(_BACKBONE),
        nextn_predict_layers=config.count("num_hidden_layers"),
    )


def _sharing(config: JsonObject) -> JsonObject:
    """Return an assistant's config, which may omit that no layer has keys of its own."""
    count = config.count("num_hidden_layers")
    return JsonObject({**config.values, "num_kv_shared_layers": count}, config.shown)


def _assistant_rules(config: JsonObject) -> Iterator[TensorRule]:
    backbone, hidden = config.count(_BACKBONE), config.count("hidden_size")
    yield weight("nextn.pre_projection", "pre_projection", (hidden, 2 * backbone))
    yield weight("nextn.post_projection", "post_projection", (backbone, hidden))
    yield from _rules(_sharing(config))


# Centroids choose the tokens that an assistant weighs; llama.cpp weighs all.
_CENTROIDS = ("masked_embedding.",)

FAMILIES = (
    Family(("Gemma4ForCausalLM",), "gemma4", _describe, _rules, _unread),
    Family(
        ("Gemma4AssistantForCausalLM",),
        "gemma4-assistant",
        _describe_assistant,
        _assistant_rules,
        lambda config: (*_unread(_sharing(config)), *_CENTROIDS),
    ),
)
