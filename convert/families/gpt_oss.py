"""gpt-oss: sinks in attention, windows in every other layer, experts with biases.

Its experts are published in MXFP4 (`checkpoint.mxfp4`) and stay so, or are stored as other numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from specrun.convert.checkpoint import JsonObject, gguf_blocks
from specrun.convert.families import steps
from specrun.convert.families.family import Array, Family, TensorRule
from specrun.convert.families.rope import describe_rope
from specrun.convert.families.steps import require
from specrun.convert.gguf import Metadata

_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_ROWS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
_BLOCK = 32  # numbers of a block in MXFP4, two in a byte


def _describe(config: JsonObject, metadata: Metadata) -> None:
    require(config, "hidden_act", "silu")
    require(config, "attention_bias", True)
    require(config, "swiglu_alpha", 1.702)
    require(config, "swiglu_limit", 7.0)
    steps.describe_decoder(config, metadata, "gpt-oss", key_length=True)
    steps.describe_experts(config, metadata, "gpt-oss")
    metadata.count("gpt-oss.expert_feed_forward_length", config.count("intermediate_size"))
    # llama.cpp rounds the bounds of YaRN's ramp, which the published models do not (truncate).
    describe_rope(config, metadata, "gpt-oss", base=150_000.0, rounded=False)
    steps.describe_windows(config, metadata, "gpt-oss", 2, 2)


def _rules(config: JsonObject) -> Iterator[TensorRule]:
    return steps.decoder_rules(config, bias=True, names=_NORMS, network=_layer)


def _layer(config: JsonObject, layer: int) -> Iterator[TensorRule]:
    """Yield a layer's sinks, its router and its experts."""
    ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
    heads = (config.count("num_attention_heads"),)
    yield TensorRule(f"{ours}attn_sinks.weight", (f"{theirs}self_attn.sinks",), heads)
    n, wide, hidden = (
        steps.n_experts(config),
        config.count("intermediate_size"),
        config.count("hidden_size"),
    )
    router = f"{theirs}mlp.router."
    yield TensorRule(f"{ours}ffn_gate_inp.weight", (f"{router}weight",), (n, hidden), keep_f32=True)
    yield TensorRule(f"{ours}ffn_gate_inp.bias", (f"{router}bias",), (n,))
    is_packed = config.any("quantization_config") is not None
    for part, rows in _ROWS.items():
        # Gates and ups take turns in one matrix.
        name = f"{theirs}mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj"
        own, whole, width = (wide, 2 * wide, hidden) if part != "down" else (hidden, hidden, wide)
        tensor, biases = f"{ours}ffn_{part}_exps", functools.partial(_columns, rows=rows)
        sources: tuple[tuple[int, ...], ...]
        names: tuple[str, ...]
        if is_packed:
            blocks = (n, whole, width // _BLOCK, _BLOCK // 2), (n, whole, width // _BLOCK)
            if width % _BLOCK:
                raise config.malformed(f"has MXFP4's rows of {width} numbers, no multiple of 32")
            change = functools.partial(_packed, rows=rows)
            sources, names = blocks, (f"{name}_blocks", f"{name}_scales")
        else:
            change = functools.partial(_turned, rows=rows)
            sources, names = ((n, width, whole),), (name,)
        yield TensorRule(
            f"{tensor}.weight",
            names,
            (n, own, width),
            change,
            source_shapes=sources,
            is_mxfp4=is_packed,
        )
        yield TensorRule(
            f"{tensor}.bias",
            (f"{name}_bias",),
            (n, own),
            biases,
            source_shapes=((n, whole),),
            keep_f32=True,
        )


def _columns(array: Array, rows: slice) -> Array:
    return array[:, rows]


def _turned(array: Array, rows: slice) -> Array:
    """Return matrices with a row for each of their results, as all others have."""
    return np.ascontiguousarray(array.swapaxes(1, 2)[:, rows])


def _packed(blocks: Array, scales: Array, rows: slice) -> Array:
    return gguf_blocks(blocks[:, rows], scales[:, rows])


FAMILIES = (Family(("GptOssForCausalLM",), "gpt-oss", _describe, _rules),)
