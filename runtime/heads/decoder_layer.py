"""A Llama layer as heads carry it: its sizes and tensors in a head's file, and its part of a ggml graph.

Tensors, after a prefix of the head's: `attn_{q,k,v,output}.weight`, `attn_{q,k,v}.bias` (optional), `ffn_norm.weight`,
`ffn_{gate,up,down}.weight`, `rope_freqs.weight` (head size / 2, optional), which divides the rotary frequencies as in
Llama 3.1.
"""

from __future__ import annotations

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.ggml.graph import GraphBuilder, Rope, Tensor
from specrun.bindings.ggml.weights import TensorStore
from specrun.runtime.heads.cached_attention import AttentionSizes, Places
from specrun.runtime.heads.head_file import HeadFile

__all__ = ["LayerWeights", "decoder_layer", "layer_attention", "layer_tensor_names"]


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


def layer_attention(file: HeadFile) -> AttentionSizes:
    """Return the attention that a file's metadata describe under llama.cpp's names; raises MalformedFileError.

    Rotary pairs are the halves of a head, as in Hugging Face's checkpoints.
    """
    hidden, heads, kv = (
        file.size("embedding_length"),
        file.size("attention.head_count"),
        file.size("attention.head_count_kv"),
    )
    if hidden % heads or heads % kv or (hidden // heads) % 2:
        raise MalformedFileError(
            f"{file.path} has {heads} heads and {kv} key-value heads for hidden states of {hidden}: convert it again"
        )
    base, factor = file.number("rope.freq_base", 10000.0), file.number("rope.scaling.factor", 1.0)
    rope = Rope(hidden // heads, freq_base=base, freq_scale=1.0 / factor, neox=True)
    return AttentionSizes(heads, kv, hidden // heads, rope)


def layer_tensor_names(file: HeadFile, prefix: str, attention: AttentionSizes) -> list[str]:
    """Return the layer's tensors in the file, checked."""
    h, kv, wide = attention.size, attention.kv_size, file.size("feed_forward_length")
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
        "rope_freqs.weight": (attention.head_size // 2,),
    }
    names = [file.require(prefix + name, shape) for name, shape in needed.items()]
    return names + [file.require(prefix + name, shape) for name, shape in optional.items() if prefix + name in file]


def decoder_layer(
    builder: GraphBuilder,
    weights: LayerWeights,
    x: Tensor,
    residual: Tensor,
    places: Places,
    norm_eps: float,
    factors: Tensor | None = None,
) -> Tensor:
    """Return y + mlp(norm(y)) with y = residual + attention(x), for rows (hidden, n).

    The rows' keys and values go to their places in a cache; `factors` divide the rotary frequencies.
    """

    def projected(name: str) -> Tensor:
        linear, bias = builder.mul_mat(weights[f"attn_{name}.weight"], x), weights.get(f"attn_{name}.bias")
        return linear if bias is None else builder.add(linear, bias)

    mixed = places.cache.attend(builder, projected("q"), projected("k"), projected("v"), places, factors)
    y = builder.add(residual, builder.mul_mat(weights["attn_output.weight"], mixed))
    normed = builder.rms_norm(y, weights["ffn_norm.weight"], norm_eps)
    gate, up = (builder.mul_mat(weights[f"ffn_{name}.weight"], normed) for name in ("gate", "up"))
    return builder.add(y, builder.mul_mat(weights["ffn_down.weight"], builder.swiglu(gate, up)))
