"""llama.cpp's GGUF layout of EAGLE-3 heads, checked against the target: files of its converter and ours are alike.

Keys: `eagle3.target_layers`, `.target_hidden_size`, `.norm_before_residual`, and the sizes that any model has. Tensors:
`fc.weight` (taps * target's h, h), `enc.output_norm.weight`, `fc_norm.{i}.weight`, `blk.0.attn_norm` (1),
`blk.0.attn_norm_2` (2), `blk.0.attn_{q,k,v}` (2h, ...), `blk.0.attn_output`, `blk.0.ffn_norm` (3),
`blk.0.ffn_{gate,up,down}`, `output_norm`, `output` (h, draft words), `d2t` (I64), `token_embd`, `rope_freqs`. Where
`output` or `token_embd` is missing, it is the target's. Rotary pairs are neighbours, as llama.cpp's converter has them.

`fc_norm` and `norm_output` of EAGLE-3.1 are keys that llama.cpp does not know: it refuses the additional tensors of the
first, and ignores the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError, PairError, UnsupportedModelError
from specrun.bindings.ggml.graph import Rope
from specrun.bindings.layer_inputs import check_layer_inputs
from specrun.bindings.model import Model
from specrun.runtime.heads.cached_attention import AttentionSizes
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.heads.pair_head import PairSizes

__all__ = ["FEATURES_NORM", "ROPE_FACTORS", "WORD_MAP", "Eagle3Layout", "checked_words", "read_layout"]

FEATURES_NORM = "enc.output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"
WORD_MAP = "d2t"


@dataclass(frozen=True, slots=True)
class Eagle3Layout:
    """What a file says of its head: the layers it reads, in its order, its sizes, and which tensors are there."""

    taps: tuple[int, ...]
    sizes: PairSizes
    norm_before_residual: bool
    norm_output: bool
    tensors: tuple[str, ...]


def read_layout(file: HeadFile, target: Model) -> Eagle3Layout:
    """Return the layout of a file; raises as `Eagle3Head` does."""
    file.check_target(target, hidden_key="target_hidden_size")
    taps = _taps(file, target)
    sizes = _sizes(file, target, len(taps))
    return Eagle3Layout(
        taps=taps,
        sizes=sizes,
        norm_before_residual=file.flag("norm_before_residual"),
        norm_output=file.flag("norm_output"),
        tensors=_tensor_names(file, sizes, target, len(taps)),
    )


def checked_words(ids: npt.NDArray[np.int64], file: HeadFile, target: Model) -> npt.NDArray[np.int32]:
    """Return the target's word of each of the head's; each must be a word of the target, and another one."""
    outside = ids[(ids < 0) | (ids >= target.vocabulary.size)]
    if len(outside):
        raise PairError(
            f"{file.path} cannot draft for {target.path}: its vocabulary map (d2t) names word {outside[0]}, and the "
            f"target has {target.vocabulary.size}"
        )
    words, counts = np.unique(ids, return_counts=True)
    if len(words) != len(ids):
        twice = words[counts > 1][0]
        raise MalformedFileError(f"{file.path} has word {twice} twice in its vocabulary map (d2t): convert it again")
    return ids.astype(np.int32)


def _taps(file: HeadFile, target: Model) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads, in its order; each must be one of the target's."""
    numbers = file.numbers("target_layers")
    if not numbers or not all(number >= 0 and number == int(number) for number in numbers):
        raise MalformedFileError(f"{file.path} does not say which layers it reads (eagle3.target_layers)")
    taps = tuple(int(number) for number in numbers)
    if max(taps) >= target.n_layer:
        raise PairError(
            f"{file.path} cannot draft for {target.path}: it reads the input of layer {max(taps)}, and the target has "
            f"{target.n_layer} layers, the first of them layer 0"
        )
    check_layer_inputs(target, taps)
    return taps


def _sizes(file: HeadFile, target: Model, n_taps: int) -> PairSizes:
    hidden, heads = file.size("embedding_length"), file.size("attention.head_count")
    kv = file.size("attention.head_count_kv", default=heads)
    head_size = file.size("attention.key_length", default=max(1, hidden // heads))
    if heads % kv or head_size != file.size("attention.value_length", default=head_size):
        raise MalformedFileError(
            f"{file.path} has {heads} heads and {kv} key-value heads of {head_size} numbers: convert it again"
        )
    words = target.vocabulary.size
    if "output.weight" in file:
        words = file.shape("output.weight")[-1]
    return PairSizes(
        hidden=hidden,
        features=n_taps * target.n_embd,
        words=words,
        feed_forward=file.size("feed_forward_length"),
        norm_eps=file.number("attention.layer_norm_rms_epsilon", 1e-6),
        attention=AttentionSizes(heads, kv, head_size, _rope(file, head_size)),
    )


def _rope(file: HeadFile, head_size: int) -> Rope:
    scaling = file.header.metadata.get("eagle3.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{file.path} scales its positions by {scaling!r}, and EAGLE-3 heads are run with none, linear or rope_freqs"
        )
    n_dims = file.size("rope.dimension_count", default=head_size)
    if n_dims % 2 or n_dims > head_size:
        raise MalformedFileError(f"{file.path} rotates {n_dims} of {head_size} numbers of a head: convert it again")
    factor = file.number("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    return Rope(n_dims, freq_base=file.number("rope.freq_base", 10000.0), freq_scale=1.0 / factor)


def _tensor_names(file: HeadFile, sizes: PairSizes, target: Model, n_taps: int) -> tuple[str, ...]:
    """Return all tensors of the file that are used, checked."""
    h, wide, attention = sizes.hidden, sizes.feed_forward, sizes.attention
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (sizes.features, h),
        "blk.0.attn_norm.weight": (h,),
        "blk.0.attn_norm_2.weight": (h,),
        "blk.0.attn_q.weight": (2 * h, attention.size),
        "blk.0.attn_k.weight": (2 * h, attention.kv_size),
        "blk.0.attn_v.weight": (2 * h, attention.kv_size),
        "blk.0.attn_output.weight": (attention.size, h),
        "blk.0.ffn_norm.weight": (h,),
        "blk.0.ffn_gate.weight": (h, wide),
        "blk.0.ffn_up.weight": (h, wide),
        "blk.0.ffn_down.weight": (wide, h),
        "output_norm.weight": (h,),
    }
    if file.flag("norm_before_fc"):
        shapes[FEATURES_NORM] = (sizes.features,)
    if file.flag("fc_norm"):
        shapes |= {f"fc_norm.{tap}.weight": (target.n_embd,) for tap in range(n_taps)}
    if ROPE_FACTORS in file:
        shapes[ROPE_FACTORS] = (attention.rope.n_dims // 2,)
    if WORD_MAP in file:
        shapes[WORD_MAP] = (sizes.words,)
    elif sizes.words != target.vocabulary.size:
        raise MalformedFileError(
            f"{file.path} predicts {sizes.words} words of the target's {target.vocabulary.size}, and has no tensor d2t "
            "that says which"
        )
    for name, words in (("token_embd.weight", target.vocabulary.size), ("output.weight", sizes.words)):
        if name in file:
            shapes[name] = (h, words)
        elif h != target.n_embd:
            raise PairError(
                f"{file.path} cannot draft for {target.path}: it has no {name}, and the target's is for states of "
                f"{target.n_embd} numbers, not {h}"
            )
    return tuple(file.require(name, shape) for name, shape in shapes.items())
