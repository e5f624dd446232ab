"""Qwen 3.5 and 3.6 (text): gated delta nets in most layers, attention with a gate in the others.

Dense, or with experts of which one is always used. A block behind the layers, a NextN block, may
predict one token further (`mtp.` in checkpoints).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families import steps
from specrun.convert.families.family import Array, Family, TensorRule
from specrun.convert.families.rope import rope_base, rope_settings
from specrun.convert.families.steps import plus_one, require, weight
from specrun.convert.gguf import Metadata

_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_BLOCK_NORMS = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
}
_SHARED = "shared_expert_intermediate_size"


def _recurrent(config: JsonObject) -> list[bool]:
    """Return which layers are delta nets."""
    count, kinds = config.count("num_hidden_layers"), config.items("layer_types")
    if not kinds:
        interval = config.count("full_attention_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if len(kinds) != count:
        raise config.malformed(f"has layer_types for {len(kinds)} of {count} layers")
    if set(kinds) != {"linear_attention", "full_attention"}:
        raise config.unsupported("has layers of other kinds, or of one: llama.cpp needs both")
    return [kind == "linear_attention" for kind in kinds]


def _n_blocks(config: JsonObject) -> int:
    """Return how many NextN blocks there are (`text_part` counts those of a checkpoint)."""
    return config.token(steps.NEXTN_BLOCKS) or 0


def _describe(config: JsonObject, metadata: Metadata, prefix: str = "qwen35") -> None:
    require(config, "hidden_act", "silu")
    require(config, "attention_bias", False)
    require(config, "attn_output_gate", True)
    state = config.count("linear_key_head_dim")
    require(config, "linear_value_head_dim", state)
    steps.describe_decoder(config, metadata, prefix, key_length=True)
    blocks, recurrent = _n_blocks(config), _recurrent(config)
    if blocks:
        metadata.count(f"{prefix}.block_count", len(recurrent) + blocks)
        metadata.count(f"{prefix}.nextn_predict_layers", blocks)
    metadata.flags(f"{prefix}.attention.recurrent_layers", [*recurrent, *[False] * blocks])
    metadata.counts(
        f"{prefix}.ssm",
        conv_kernel=config.count("linear_conv_kernel_dim"),
        state_size=state,
        group_count=config.count("linear_num_key_heads"),
        time_step_rank=config.count("linear_num_value_heads"),
        inner_size=state * config.count("linear_num_value_heads"),
    )
    rope, kind = rope_settings(config)
    if kind != "default":
        raise rope.unsupported(f"is {kind!r}: only default can be read for {prefix}")
    part = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 0.25))
    metadata.count(f"{prefix}.rope.dimension_count", int(steps.head_width(config) * part))
    metadata.number(f"{prefix}.rope.freq_base", rope_base(config, rope))
    # Pairs take turns to turn by time, height and width, which are the same in a text: all turn.
    pairs = int(steps.head_width(config) * part) // 2
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    metadata.integers(f"{prefix}.rope.dimension_sections", sections)


def _describe_moe(config: JsonObject, metadata: Metadata) -> None:
    wide, shared = config.count("moe_intermediate_size"), config.count(_SHARED)
    values = {"intermediate_size": wide, **config.values}
    _describe(JsonObject(values, config.shown), metadata, "qwen35moe")
    steps.describe_experts(config, metadata, "qwen35moe")
    metadata.counts(
        "qwen35moe",
        expert_feed_forward_length=wide,
        expert_shared_feed_forward_length=shared,
    )


def _rules(config: JsonObject, *, experts: bool = False) -> Iterator[TensorRule]:
    yield from steps.embeddings(config, norm=plus_one)
    recurrent, hidden = _recurrent(config), config.count("hidden_size")
    places = [f"model.layers.{layer}." for layer in range(len(recurrent))]
    places += [f"mtp.layers.{block}." for block in range(_n_blocks(config))]
    for layer, theirs in enumerate(places):
        ours = f"blk.{layer}."
        is_recurrent = layer < len(recurrent) and recurrent[layer]
        yield from (_delta_net if is_recurrent else _attention)(config, ours, theirs)
        yield from (_experts if experts else _network)(config, layer, theirs)
        for name, source in _NORMS.items():
            yield weight(f"{ours}{name}", f"{theirs}{source}", (hidden,), plus_one)
    for layer in range(len(recurrent), len(places)):
        ours = f"blk.{layer}.nextn."
        yield weight(f"{ours}eh_proj", "mtp.fc", (hidden, 2 * hidden))
        for name, source in _BLOCK_NORMS.items():
            yield weight(f"{ours}{name}", f"mtp.{source}", (hidden,), plus_one)


def _attention(config: JsonObject, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Yield queries with their gates, keys, values, the output and the norms of heads."""
    hidden, wide = config.count("hidden_size"), steps.head_width(config)
    queries, keys = config.count("num_attention_heads") * wide, steps.kv_heads(config) * wide
    for part, rows in (("q", 2 * queries), ("k", keys), ("v", keys)):
        yield weight(f"{ours}attn_{part}", f"{theirs}self_attn.{part}_proj", (rows, hidden))
    yield weight(f"{ours}attn_output", f"{theirs}self_attn.o_proj", (hidden, queries))
    for part in ("q", "k"):
        source = f"{theirs}self_attn.{part}_norm"
        yield weight(f"{ours}attn_{part}_norm", source, (wide,), plus_one)


def _delta_net(config: JsonObject, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Yield a gated delta net, whose value heads llama.cpp has in the order of key heads."""
    hidden, state = config.count("hidden_size"), config.count("linear_key_head_dim")
    n_keys, n_values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    if n_values % n_keys:
        raise config.malformed(f"has {n_values} value heads over {n_keys} key heads")
    values, kernel = n_values * state, config.count("linear_conv_kernel_dim")
    first, theirs = 2 * n_keys * state, f"{theirs}linear_attn."
    mixed = first + values

    def tiled(size: int, first: int = 0, axis: int = 0) -> functools.partial[Array]:
        return functools.partial(_tiled, groups=n_keys, size=size, first=first, axis=axis)

    def rule(
        name: str, source: str, shape: tuple[int, ...], change: functools.partial[Array]
    ) -> TensorRule:
        return TensorRule(f"{ours}{name}", (f"{theirs}{source}",), shape, change, moves_only=True)

    yield rule("attn_qkv.weight", "in_proj_qkv.weight", (mixed, hidden), tiled(state, first))
    yield rule("attn_gate.weight", "in_proj_z.weight", (values, hidden), tiled(state))
    yield rule("ssm_beta.weight", "in_proj_b.weight", (n_values, hidden), tiled(1))
    yield rule("ssm_alpha.weight", "in_proj_a.weight", (n_values, hidden), tiled(1))
    yield rule("ssm_out.weight", "out_proj.weight", (hidden, values), tiled(state, axis=1))
    yield rule("ssm_dt.bias", "dt_bias", (n_values,), tiled(1))
    yield weight(f"{ours}ssm_norm", f"{theirs}norm", (state,))
    decay = functools.partial(_decay, change=tiled(1))
    yield TensorRule(f"{ours}ssm_a", (f"{theirs}A_log",), (n_values,), decay)
    yield TensorRule(
        f"{ours}ssm_conv1d.weight",
        (f"{theirs}conv1d.weight",),
        (mixed, 1, kernel),
        functools.partial(_kernels, change=tiled(state, first)),
        (mixed, kernel),
        keep_f32=True,
    )


def _tiled(array: Array, *, groups: int, size: int, first: int, axis: int) -> Array:
    """Return an array whose heads of `size`, from `first` on, take turns by group."""
    head, rest = np.split(array, [first], axis=axis)
    moved = np.moveaxis(rest, axis, 0)
    heads = moved.reshape(groups, -1, size, *moved.shape[1:]).swapaxes(0, 1)
    turned = np.moveaxis(heads.reshape(moved.shape), 0, axis)
    return np.concatenate([head, turned], axis=axis)


def _decay(array: Array, change: functools.partial[Array]) -> Array:
    return change(-np.exp(array.astype(np.float32, copy=False)))


def _kernels(array: Array, change: functools.partial[Array]) -> Array:
    return change(array[:, 0])


def _network(config: JsonObject, layer: int, theirs: str) -> Iterator[TensorRule]:
    sizes = config.count("intermediate_size"), config.count("hidden_size")
    return steps.gated(f"blk.{layer}.ffn_", "", f"{theirs}mlp.", *sizes)


def _experts(config: JsonObject, layer: int, theirs: str) -> Iterator[TensorRule]:
    """Yield the router, the experts, and the expert that is always used with its gate."""
    ours, theirs, hidden = f"blk.{layer}.ffn_", f"{theirs}mlp.", config.count("hidden_size")
    sizes = steps.n_experts(config), config.count("moe_intermediate_size"), hidden
    yield from steps.expert_rules(layer, f"{theirs}gate", f"{theirs}experts", config, sizes)
    yield from steps.gated(ours, "_shexp", f"{theirs}shared_expert.", config.count(_SHARED), hidden)
    yield TensorRule(
        f"{ours}gate_inp_shexp.weight",
        (f"{theirs}shared_expert_gate.weight",),
        (1, hidden),
        _row,
        (hidden,),
    )


def _row(array: Array) -> Array:
    return array.reshape(-1)


def _moe_rules(config: JsonObject) -> Iterator[TensorRule]:
    return _rules(config, experts=True)


FAMILIES = (
    Family(("Qwen3_5ForCausalLM",), "qwen35", _describe, _rules),
    Family(("Qwen3_5MoeForCausalLM",), "qwen35moe", _describe_moe, _moe_rules),
)
