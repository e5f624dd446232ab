"""Steps that families share: the keys of a decoder-only transformer and the rules of its tensors.

A decoder is embeddings, layers of attention and a gated feed-forward network, each behind an RMS
norm, a last norm, and an output matrix that may be the embeddings themselves ("tied").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Array, TensorRule, unchanged
from specrun.convert.gguf import Metadata

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
FUSED_EXPERTS, NEXTN_TOKENS = "experts_in_one_tensor", "nextn_blocks_have_tokens"
"""Keys that `text_part` adds to the config of a checkpoint which has its tensors so."""

NEXTN_BLOCKS = "mtp_num_hidden_layers"
"""The key of the number of NextN blocks, as `text_part` counts them."""

_Change = Callable[[Array], Array]


def kv_heads(config: JsonObject) -> int:
    """Return the number of key-value heads."""
    return config.count("num_key_value_heads", config.count("num_attention_heads"))


def head_width(config: JsonObject) -> int:
    """Return the width of one attention head."""
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if "head_dim" not in config and width % heads:
        raise config.malformed(f"has hidden_size {width}, which is not divisible by {heads} heads")
    if heads % kv_heads(config):
        raise config.malformed(f"has {heads} heads over {kv_heads(config)} key-value heads")
    wide = config.count("head_dim", max(1, width // heads))
    # Rotary embeddings turn pairs of numbers.
    if wide % 2:
        raise config.malformed(f"has heads of width {wide}, which must be even")
    return wide


def require(config: JsonObject, key: str, wanted: object) -> None:
    """Raise UnsupportedModelError unless `key` is absent or `wanted`: llama.cpp has no more."""
    if key in config and config.any(key) != wanted:
        raise config.unsupported(f"has {key} = {config.any(key)!r}: llama.cpp has only {wanted!r}")


def require_square_attention(config: JsonObject) -> None:
    """Raise UnsupportedModelError unless the heads together are as wide as the hidden states."""
    inner = config.count("num_attention_heads") * head_width(config)
    width = config.count("hidden_size")
    if inner != width:
        raise config.unsupported(
            f"has heads of {inner} numbers together and hidden states of {width}: "
            "llama.cpp has only equal ones for this family"
        )


def stated_window(config: JsonObject) -> int | None:
    """Return the sliding window that the config states, None for none."""
    return config.count("sliding_window") if "sliding_window" in config else None


def describe_decoder(
    config: JsonObject,
    metadata: Metadata,
    prefix: str,
    *,
    window: int | None = None,
    key_length: bool = False,
) -> None:
    """Write the keys of a decoder with RMS norms; `prefix` is llama.cpp's architecture.

    `window` is a sliding window that llama.cpp does not have for the architecture: within it the
    numbers are the same, so it becomes the context length. `key_length` writes the width of heads
    even if it follows.
    """
    heads, width = config.count("num_attention_heads"), head_width(config)
    context = config.count("max_position_embeddings")
    metadata.count(f"{prefix}.vocab_size", config.count("vocab_size"))
    metadata.count(f"{prefix}.context_length", context if window is None else min(context, window))
    metadata.count(f"{prefix}.embedding_length", config.count("hidden_size"))
    metadata.count(f"{prefix}.block_count", config.count("num_hidden_layers"))
    metadata.count(f"{prefix}.feed_forward_length", config.count("intermediate_size"))
    metadata.counts(f"{prefix}.attention", head_count=heads, head_count_kv=kv_heads(config))
    metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon", config.number("rms_norm_eps"))
    if key_length or heads * width != config.count("hidden_size"):
        metadata.counts(f"{prefix}.attention", key_length=width, value_length=width)


def describe_windows(
    config: JsonObject, metadata: Metadata, prefix: str, pattern: int, usual: int
) -> None:
    """Write the window, and which layers slide unless all but every `usual`-th do."""
    count = config.count("num_hidden_layers")
    slides = [(layer + 1) % pattern != 0 for layer in range(count)]
    if "layer_types" in config:
        slides = [kind == "sliding_attention" for kind in config.items("layer_types")]
        if len(slides) != count:
            raise config.malformed(f"has layer_types for {len(slides)} of {count} layers")
    metadata.count(f"{prefix}.attention.sliding_window", config.count("sliding_window", 4096))
    if slides != [(layer + 1) % usual != 0 for layer in range(count)]:
        metadata.flags(f"{prefix}.attention.sliding_window_pattern", slides)


def interleave_halves(array: Array, heads: int) -> Array:
    """Reorder the rows of a query or key projection, per head.

    Hugging Face rotates row i of a head with row i + half, llama.cpp row 2i with row 2i + 1.
    """
    # Axes: head, half, place in the half. Swapped, the partners of a rotation lie side by side.
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def plus_one(array: Array) -> Array:
    """Return a norm's weights as factors, if the checkpoint stores their difference from 1."""
    # In float32: next to 1, bfloat16 keeps few of a small weight's digits.
    return array.astype(np.float32, copy=False) + np.float32(1.0)


def with_bias(
    name: str, source: str, shape: tuple[int, int], *, bias: bool, rope_heads: int = 0
) -> Iterator[TensorRule]:
    """Yield the rules of a matrix and its bias; `rope_heads` > 0 interleaves halves of as many."""
    change = functools.partial(interleave_halves, heads=rope_heads) if rope_heads else unchanged
    yield TensorRule(f"{name}.weight", (f"{source}.weight",), shape, change, moves_only=True)
    if bias:
        yield TensorRule(f"{name}.bias", (f"{source}.bias",), shape[:1], change, moves_only=True)


def decoder_rules(
    config: JsonObject,
    *,
    tied: bool = False,
    between: Iterable[TensorRule] = (),
    bias: bool = False,
    output_bias: bool | None = None,
    interleaved: bool = False,
    normed_heads: bool = False,
    names: Mapping[str, str] = _NORMS,
    norm: _Change = unchanged,
    network: Callable[[JsonObject, int], Iterator[TensorRule]] | None = None,
) -> Iterator[TensorRule]:
    """Yield the tensors of a whole decoder, `between` those that come before the layers.

    `tied` is the family's value of an absent tie_word_embeddings. `bias` is that of queries,
    keys and values, and of the output unless `output_bias` is given; `interleaved` is for
    architectures whose rope rotates neighbours instead of halves, `normed_heads` for norms of each
    head's queries and keys. `names` are the norms of hidden states, `norm` the change of norms;
    `network` yields the feed-forward network of a layer, of one gate and two matrices unless given.
    """
    yield from embeddings(config, tied=tied, norm=norm)
    yield from between
    output_bias = bias if output_bias is None else output_bias
    for layer in range(config.count("num_hidden_layers")):
        yield from _attention(config, layer, bias, output_bias, interleaved)
        if normed_heads:
            yield from _head_norms(config, layer, norm)
        yield from (network or _feed_forward)(config, layer)
        yield from norms(config, layer, names, norm)


def embeddings(
    config: JsonObject, *, tied: bool = False, norm: _Change = unchanged
) -> Iterator[TensorRule]:
    """Yield the rules of the embeddings, the output matrix and the last norm."""
    shape = config.count("vocab_size"), config.count("hidden_size")
    yield TensorRule("token_embd.weight", ("model.embed_tokens.weight",), shape)
    # llama.cpp takes the embeddings if there is no output matrix.
    if not config.flag("tie_word_embeddings", tied):
        yield TensorRule("output.weight", ("lm_head.weight",), shape)
    yield TensorRule("output_norm.weight", ("model.norm.weight",), shape[1:], norm)


def _attention(
    config: JsonObject, layer: int, bias: bool, output_bias: bool, interleaved: bool
) -> Iterator[TensorRule]:
    width, wide = config.count("hidden_size"), head_width(config)
    heads, shared = config.count("num_attention_heads"), kv_heads(config)
    block, source = f"blk.{layer}.attn_", f"model.layers.{layer}.self_attn."
    for part, count, rotated in (("q", heads, True), ("k", shared, True), ("v", shared, False)):
        # Values are not rotated: their rows stay.
        rope_heads = count if interleaved and rotated else 0
        shape = (count * wide, width)
        ours, theirs = f"{block}{part}", f"{source}{part}_proj"
        yield from with_bias(ours, theirs, shape, bias=bias, rope_heads=rope_heads)
    shape = (width, heads * wide)
    yield from with_bias(f"{block}output", f"{source}o_proj", shape, bias=output_bias)


def weight(
    name: str, source: str, shape: tuple[int, ...], change: _Change = unchanged
) -> TensorRule:
    """Return the rule of a weight, of the same name but for its beginning."""
    return TensorRule(f"{name}.weight", (f"{source}.weight",), shape, change)


def gated(ours: str, ending: str, theirs: str, wide: int, hidden: int) -> Iterator[TensorRule]:
    """Yield gate, up and down of a network of this width."""
    for part, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
        yield weight(f"{ours}{part}{ending}", f"{theirs}{part}_proj", shape)


def fused_experts(ours: str, theirs: str, sizes: tuple[int, int, int]) -> Iterator[TensorRule]:
    """Yield experts in two tensors, gates before ups; `sizes` as in `expert_rules`."""
    n, wide, hidden = sizes
    for part, shape in (("gate_up", (n, 2 * wide, hidden)), ("down", (n, hidden, wide))):
        yield TensorRule(f"{ours}{part}_exps.weight", (f"{theirs}{part}_proj",), shape)


def _feed_forward(config: JsonObject, layer: int) -> Iterator[TensorRule]:
    sizes = config.count("intermediate_size"), config.count("hidden_size")
    return gated(f"blk.{layer}.ffn_", "", f"model.layers.{layer}.mlp.", *sizes)


def n_experts(config: JsonObject) -> int:
    """Return the number of experts; transformers 5 writes one name for all families."""
    names = "num_experts", "n_routed_experts"
    return config.count(next((name for name in names if name in config), "num_local_experts"))


def describe_experts(config: JsonObject, metadata: Metadata, prefix: str) -> None:
    """Write how many experts there are, and how many a token has."""
    metadata.count(f"{prefix}.expert_count", n_experts(config))
    metadata.count(f"{prefix}.expert_used_count", config.count("num_experts_per_tok"))


def expert_rules(
    layer: int,
    router: str,
    experts: str,
    config: JsonObject,
    sizes: tuple[int, int, int],
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[TensorRule]:
    """Yield a layer's router, and the matrices of its experts, each kind in one tensor.

    `names` are those of gate, up and down behind `experts` and a number, `sizes` how many there
    are, their width and the hidden states'. Some checkpoints have all experts in one tensor.
    """
    n, wide, hidden = sizes
    ours = f"blk.{layer}.ffn_"
    yield TensorRule(f"{ours}gate_inp.weight", (f"{router}.weight",), (n, hidden), keep_f32=True)
    if config.flag(FUSED_EXPERTS, False):
        yield from fused_experts(ours, f"{experts}.", sizes)
        return
    shapes = (wide, hidden), (wide, hidden), (hidden, wide)
    for part, name, shape in zip(("gate", "up", "down"), names, shapes, strict=True):
        sources = tuple(f"{experts}.{expert}.{name}.weight" for expert in range(n))
        whole = (n, *shape)
        tensor = f"{ours}{part}_exps.weight"
        yield TensorRule(tensor, sources, shape, _stacked, whole, moves_only=True)


def _stacked(*arrays: Array) -> Array:
    return np.stack(arrays)


def norms(
    config: JsonObject, layer: int, names: Mapping[str, str] = _NORMS, norm: _Change = unchanged
) -> Iterator[TensorRule]:
    """Yield the rules of a layer's norms over hidden states, `names` from ours to theirs."""
    for ours, theirs in names.items():
        source = f"model.layers.{layer}.{theirs}.weight"
        shape = (config.count("hidden_size"),)
        yield TensorRule(f"blk.{layer}.{ours}.weight", (source,), shape, norm)


def _head_norms(config: JsonObject, layer: int, norm: _Change) -> Iterator[TensorRule]:
    for part in ("q", "k"):
        source = f"model.layers.{layer}.self_attn.{part}_norm.weight"
        shape = (head_width(config),)
        yield TensorRule(f"blk.{layer}.attn_{part}_norm.weight", (source,), shape, norm)
