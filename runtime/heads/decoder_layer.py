"""One Llama layer with a key-value cache of its own, as heads carry it: sizes, tensors, and its part of a ggml graph.

Tensors, after a prefix of the head's: `attn_{q,k,v,output}.weight`, `attn_{q,k,v}.bias` (optional), `ffn_norm.weight`,
`ffn_{gate,up,down}.weight`, `rope_freqs.weight` (head size / 2, optional), which divides the rotary frequencies as in
Llama 3.1. Rotary pairs are the halves of a head, as in Hugging Face's checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.ggml.functions import F32, I32, I64
from specrun.bindings.ggml.graph import GraphBuilder, Rope, Tensor
from specrun.bindings.ggml.weights import TensorStore
from specrun.runtime.heads.head_file import HeadFile

__all__ = ["LayerSizes", "LayerWeights", "attention", "feed_forward", "layer_sizes", "layer_tensor_names"]


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a layer, as the head's file states them; rotary positions are multiplied by `rope_scale`."""

    hidden: int
    n_heads: int
    n_kv_heads: int
    feed_forward: int
    rope_base: float
    rope_scale: float
    norm_eps: float

    @property
    def head_size(self) -> int:
        """Numbers of one attention head."""
        return self.hidden // self.n_heads

    @property
    def kv_size(self) -> int:
        """Numbers of one position's keys."""
        return self.n_kv_heads * self.head_size


class LayerWeights:
    """A layer's tensors by the names above, among those of a whole head."""

    def __init__(self, store: TensorStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return Tensor(self._store[self._prefix + name])

    def get(self, name: str) -> Tensor | None:
        """Return an optional tensor, None where the head has none."""
        return self[name] if self._prefix + name in self._store else None


def layer_sizes(file: HeadFile) -> LayerSizes:
    """Read the sizes from the file's metadata, under llama.cpp's names; raises MalformedFileError."""
    hidden, heads, kv = (
        file.size("embedding_length"),
        file.size("attention.head_count"),
        file.size("attention.head_count_kv"),
    )
    if hidden % heads or heads % kv or (hidden // heads) % 2:
        raise MalformedFileError(
            f"{file.path} has {heads} heads and {kv} key-value heads for hidden states of {hidden}: convert it again"
        )
    return LayerSizes(
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=kv,
        feed_forward=file.size("feed_forward_length"),
        rope_base=file.number("rope.freq_base", 10000.0),
        rope_scale=1.0 / file.number("rope.scaling.factor", 1.0),
        norm_eps=file.number("attention.layer_norm_rms_epsilon", 1e-6),
    )


def layer_tensor_names(file: HeadFile, prefix: str, sizes: LayerSizes) -> list[str]:
    """Return the layer's tensors in the file, checked."""
    h, kv, wide = sizes.hidden, sizes.kv_size, sizes.feed_forward
    needed: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (h, h),
        "attn_k.weight": (h, kv),
        "attn_v.weight": (h, kv),
        "attn_output.weight": (h, h),
        "ffn_norm.weight": (h,),
        "ffn_gate.weight": (h, wide),
        "ffn_up.weight": (h, wide),
        "ffn_down.weight": (wide, h),
    }
    optional = {
        "attn_q.bias": (h,),
        "attn_k.bias": (kv,),
        "attn_v.bias": (kv,),
        "rope_freqs.weight": (sizes.head_size // 2,),
    }
    names = [file.require(prefix + name, shape) for name, shape in needed.items()]
    return names + [file.require(prefix + name, shape) for name, shape in optional.items() if prefix + name in file]


def attention(
    builder: GraphBuilder, x: Tensor, weights: LayerWeights, cache: TensorStore, sizes: LayerSizes, length: int
) -> Tensor:
    """Return the layer's attention over the first `length` cells of `cache`, for normed rows x (hidden, n).

    Adds the graph's inputs `positions` I32 (n), `cells` I64 (n) where keys and values go, and `mask` F32 (length, n):
    0 for a cell that a row sees, minus infinity for the others. The cache holds `keys` and `values`, (kv, cells).
    """
    n, d = x.shape[1], sizes.head_size
    positions, cells = builder.input("positions", I32, n), builder.input("cells", I64, n)
    mask = builder.input("mask", F32, length, n)
    rope = Rope(d, freq_base=sizes.rope_base, freq_scale=sizes.rope_scale, neox=True)
    factors = weights.get("rope_freqs.weight")

    def heads(name: str, count: int, *, rotate: bool) -> Tensor:
        linear = builder.mul_mat(weights[f"attn_{name}.weight"], x)
        bias = weights.get(f"attn_{name}.bias")
        split = builder.reshape(linear if bias is None else builder.add(linear, bias), d, count, n)
        return builder.rope(split, positions, rope, factors) if rotate else split

    query = heads("q", sizes.n_heads, rotate=True)
    for name, stored, rotate in (("k", "keys", True), ("v", "values", False)):
        rows = builder.reshape(heads(name, sizes.n_kv_heads, rotate=rotate), sizes.kv_size, n)
        builder.keep(builder.set_rows(Tensor(cache[stored]), rows, cells))
    keys, values = (
        builder.reshape(builder.first_rows(Tensor(cache[name]), length), d, sizes.n_kv_heads, length)
        for name in ("keys", "values")
    )
    scores = builder.mul_mat(builder.permute(keys, 0, 2, 1, 3), builder.permute(query, 0, 2, 1, 3))
    shares = builder.soft_max(scores, mask, 1.0 / math.sqrt(d))
    by_cell = builder.contiguous(builder.permute(values, 1, 2, 0, 3))
    mixed = builder.permute(builder.mul_mat(by_cell, shares), 0, 2, 1, 3)
    joined = builder.reshape(builder.contiguous(mixed), sizes.hidden, n)
    return builder.mul_mat(weights["attn_output.weight"], joined)


def feed_forward(builder: GraphBuilder, x: Tensor, weights: LayerWeights, sizes: LayerSizes) -> Tensor:
    """Return the layer's feed-forward part for rows x (hidden, n), its norm included."""
    normed = builder.rms_norm(x, weights["ffn_norm.weight"], sizes.norm_eps)
    gate, up = (builder.mul_mat(weights[f"ffn_{name}.weight"], normed) for name in ("gate", "up"))
    return builder.mul_mat(weights["ffn_down.weight"], builder.swiglu(gate, up))
