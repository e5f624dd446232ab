"""The heads of EAGLE-1, EAGLE-2 and EAGLE-3, and the tokens that they may draft."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.rows import check_layer_inputs
from specrun.bindings.errors import (
    MalformedFileError,
    OptionError,
    PairError,
    UnsupportedModelError,
)
from specrun.bindings.ggml import GraphBuilder, Tensor
from specrun.bindings.ggml.graph import Rope
from specrun.bindings.ggml.weights import read_numbers
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.eagle.head import PairHead, PairSizes
from specrun.runtime.heads import (
    AttentionSizes,
    FloatRows,
    HeadFile,
    Places,
    decoder_layer,
    layer_attention,
    layer_tensor_names,
)
from specrun.runtime.language import method_of_head

# == The tokens that a head may draft: the most frequent (FR-Spec, Zhao et al. 2025) ===============
#
# A depth of a draft multiplies the head's state by the target's output matrix, which for a large
# vocabulary and a small target is most of the cost of drafting. With the rows of frequent tokens
# alone it costs a fraction. Other tokens are never drafted, which is exact: their draft probability
# is 0, and the target itself chooses them.
#
# A file of an EAGLE-1 head may name them, the most frequent first: `draft_tokens`, I64 (n). An
# EAGLE-3 head has a vocabulary of its own, `d2t`.


DRAFT_TOKENS = "draft_tokens"
FEWEST = 16
ALL = 0
"""As a number of draft tokens: all of the target's."""

Ids = npt.NDArray[np.int32]


def draft_vocabulary(file: HeadFile, target: Model, most: int | None = None) -> Ids | None:
    """Return the ids, rising, of the tokens that a head drafts; None if these are all.

    They are those that its file names, or with `most` the first of them, which are the most
    frequent. Of a file that names none they are the tokens with the lowest ids, by which
    vocabularies of byte pairs count how frequent they are, and those that end a text. Raises
    OptionError for fewer than 16 tokens or more than the file names, PairError and
    MalformedFileError for a list that is none.
    """
    size = target.vocabulary.size
    if most is not None and most != ALL and most < FEWEST:
        raise OptionError(f"draft_tokens is {most}: give at least {FEWEST}, or all")
    if most == ALL or (most is None and DRAFT_TOKENS not in file):
        return None
    if DRAFT_TOKENS not in file:
        ends = [end for end in target.vocabulary.end_of_generation if end >= (most or size)]
        ids = np.array([*range(min(most or size, size)), *ends], np.int64)
        return None if len(ids) >= size else np.sort(ids).astype(np.int32)
    named = _named(file, target)
    if most is not None and most > len(named):
        problem = f"draft_tokens is {most}, and {file.path} names {len(named)}"
        raise OptionError(f"{problem}: give at most so many, or all")
    return np.sort(named[:most])


def checked_ids(ids: npt.NDArray[np.int64], file: HeadFile, target: Model, name: str) -> Ids:
    """Return the target's tokens that the tensor `name` of a file lists; each may be there once."""
    outside = ids[(ids < 0) | (ids >= target.vocabulary.size)]
    if len(outside):
        raise PairError(
            f"{file.path} cannot draft for {target.path}: its {name} names token "
            f"{outside[0]}, and the target has {target.vocabulary.size}"
        )
    # A token named twice would keep only one of its logits in `PairHead.target_rows`.
    tokens, counts = np.unique(ids, return_counts=True)
    if len(tokens) != len(ids):
        twice = tokens[counts > 1][0]
        raise MalformedFileError(
            f"{file.path} has token {twice} twice in its {name}: convert it again"
        )
    return ids.astype(np.int32)


def _named(file: HeadFile, target: Model) -> Ids:
    shape, kind = file.shape(DRAFT_TOKENS), file.type_name(DRAFT_TOKENS)
    if len(shape) != 1 or kind != "I64" or shape[0] < FEWEST:
        raise MalformedFileError(
            f"{file.path} has {DRAFT_TOKENS} of {kind} {list(shape)}, not a list of at least "
            f"{FEWEST} in I64: convert it again"
        )
    ids = read_numbers(file.path, DRAFT_TOKENS, np.int64)
    return checked_ids(ids, file, target, "list of draft tokens (draft_tokens)")


# == EAGLE-1 and EAGLE-2 (Li et al. 2024) ==========================================================
#
# It predicts the target's next final hidden state from the one at position j, f_j, and the token
# after it, t_(j+1): x = fc [embed(t_(j+1)); f_j] + b, then one Llama layer without an input norm
# (attention over the pairs before, x + attn; then x + mlp(norm(x))). The target's own output matrix
# turns the predicted state into the draft distribution of t_(j+2). Reference: SafeAILab/EAGLE,
# `eagle/model/cnets1.py` and `cnets.py`; HASS checkpoints are of the same form.
#
# Tensors: `eagle.fc.weight` (2h, h), `eagle.fc.bias` (h, optional), those of `decoder_layer` after
# `eagle.`, and if a file has them, `token_embd.weight` (h, vocab) and `draft_tokens`.


class EagleHead(PairHead):
    """The head of a file, for the target it was made for; the options are those of `PairHead`.

    It drafts the tokens of `draft_vocabulary`, of which there are `draft_tokens` at most.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        draft_tokens: int | None = None,
        *,
        ranks: int,
        whole_rows: bool = False,
        n_threads: int = 0,
    ) -> None:
        file = HeadFile(path, "eagle")
        file.check_target(target)
        attention, vocab_size = layer_attention(file), file.size("vocab_size")
        drafted, h = draft_vocabulary(file, target, draft_tokens), attention.size
        names = [file.require("eagle.fc.weight", (2 * h, h))]
        names += layer_tensor_names(file, "eagle.", attention, hidden=h, reads=h)
        for name, shape in (("eagle.fc.bias", (h,)), ("token_embd.weight", (h, vocab_size))):
            if name in file:
                names.append(file.require(name, shape))
        sizes = PairSizes(
            hidden=h,
            features=h,
            vocab_size=vocab_size if drafted is None else len(drafted),
            norm_eps=file.number("attention.layer_norm_rms_epsilon", 1e-6),
            attention=attention,
        )
        made = sizes, target, drafted
        super().__init__(file, names, "eagle.", *made, ranks, whole_rows, n_threads)

    def predicted(
        self, builder: GraphBuilder, tokens: Tensor, states: Tensor, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output for fc [embedding; state] + b, twice: it is read as it is."""
        # The embedding comes first, as in cnets.py: fc's columns are in that order.
        x = builder.mul_mat(self._layer["fc.weight"], builder.concat(tokens, states))
        bias = self._layer.get("fc.bias")
        x = x if bias is None else builder.add(x, bias)
        # x is its own residual, without an input norm: the layer of EAGLE-1 has none.
        x = decoder_layer(builder, self._layer, x, x, places, self.sizes.norm_eps)
        return x, x


# == EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and 3.1, in llama.cpp's GGUF layout ================
#
# The target's features at position j are the inputs of some of its layers there, one after the
# other (three, low, middle and high). fc makes a state g_j of them. With the token after it,
# t_(j+1), one Llama layer computes y = r + attn([norm_1(embed(t_(j+1))); norm_2(g_j)]), z = y +
# mlp(norm_3(y)), where r is g_j, or norm_2(g_j) if `norm_before_residual`. output(norm(z)) is the
# draft distribution of t_(j+2), over a draft vocabulary of which `d2t` names the target's tokens.
# Below the last real pair z stands in the place of g.
#
# EAGLE-3.1 norms inputs and fed-back states: `norm_before_fc`, all features together by
# `enc.output_norm` (the only one that llama.cpp computes too); `fc_norm`, each layer's by a norm of
# its own; `norm_output`, norm(z) is fed back, not z. References: SafeAILab/EAGLE,
# `eagle/model/cnets.py` at 148042c5; vLLM's `llama_eagle3.py`; llama.cpp's `src/models/eagle3.cpp`.
#
# Files of llama.cpp's converter and of ours are alike. Keys: `eagle3.target_layers`,
# `.target_hidden_size`, `.norm_before_residual`, and the sizes that any model has. Tensors:
# `fc.weight` (taps * target's h, h), `enc.output_norm.weight`, `fc_norm.{i}.weight`,
# `blk.0.attn_norm` (1), `blk.0.attn_norm_2` (2), `blk.0.attn_{q,k,v}` (2h, ...),
# `blk.0.attn_output`, `blk.0.ffn_norm` (3), `blk.0.ffn_{gate,up,down}`, `output_norm`, `output` (h,
# draft vocab), `d2t` (I64), `token_embd`, `rope_freqs`. If `output` or `token_embd` is missing,
# it is the target's. Rotary pairs are neighbours, as llama.cpp's converter has them.
#
# `fc_norm` and `norm_output` of EAGLE-3.1 are keys that llama.cpp does not have: it refuses the
# additional tensors of the first, and ignores the second. It refuses `blk.0.attn_{q,k}_norm`, too,
# norms of each head's queries and keys, which DeepSpec's heads have (deepseek-ai/DeepSpec,
# modeling/eagle3/qwen3), and more layers than one: those behind the first, `blk.1.*` and so on, are
# a Llama's own, with `attn_norm` alone and matrices that read h numbers (vllm-project/speculators,
# models/eagle3). Any matrix of a layer may have a `.bias`, and positions may be YaRN's.
#
# P-EAGLE's head drafts in parallel (`parallel`): `mask_hidden` (taps * target's h) are the features
# in a pair whose token is the mask, `tokenizer.ggml.mask_token_id`.


FEATURES_NORM = "enc.output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"
VOCABULARY_MAP = "d2t"
MASK_FEATURES, MASK_TOKEN = "mask_hidden", "tokenizer.ggml.mask_token_id"
DRAFTED = "speculative_tokens"  # the key of how many tokens P-EAGLE drafts at most
_MOST_LAYERS, _MOST_DRAFTED = 64, 64
_USUAL_DRAFTED = 8  # speculators' own, of a file that names no number


@dataclass(frozen=True, slots=True)
class Eagle3Layout:
    """A file's facts of its head: the layers it reads, in its order, its sizes, its tensors.

    `mask` is the token that stands for those to draft in a head that drafts in parallel (P-EAGLE),
    None in others; `n_drafted` are so many as it was trained for.
    """

    taps: tuple[int, ...]
    sizes: PairSizes
    norm_before_residual: bool
    norm_output: bool
    tensors: tuple[str, ...]
    mask: int | None = None
    n_drafted: int = 0


def read_layout(file: HeadFile, target: Model) -> Eagle3Layout:
    """Return the layout of a file; raises as `Eagle3Head` does."""
    file.check_target(target, hidden_key="target_hidden_size")
    taps = _taps(file, target)
    sizes = _eagle3_sizes(file, target, len(taps))
    tensors = _eagle3_tensor_names(file, sizes, target, len(taps))
    before, output = file.flag("norm_before_residual"), file.flag("norm_output")
    mask = _mask(file, target)
    n_drafted = 0 if mask is None else file.size(DRAFTED, _MOST_DRAFTED, default=_USUAL_DRAFTED)
    return Eagle3Layout(taps, sizes, before, output, tensors, mask, n_drafted)


def _mask(file: HeadFile, target: Model) -> int | None:
    """Return the token that stands for those to draft, None if there is none, checked."""
    if MASK_FEATURES not in file:
        return None
    mask = file.header.metadata.get(MASK_TOKEN)
    if not isinstance(mask, int) or isinstance(mask, bool):
        problem = f"names no mask token ({MASK_TOKEN})"
        raise MalformedFileError(f"{file.path} {problem}: convert it again")
    if not 0 <= mask < target.vocabulary.size:
        raise PairError(
            f"{file.path} cannot draft for {target.path}: its mask is token {mask}, and the target "
            f"has {target.vocabulary.size} tokens"
        )
    return mask


def _target_ids(file: HeadFile, target: Model) -> Ids:
    """Return the target's token of each of the head's, from its vocabulary map, checked."""
    ids = read_numbers(file.path, VOCABULARY_MAP, np.int64)
    return checked_ids(ids, file, target, "vocabulary map (d2t)")


def _taps(file: HeadFile, target: Model) -> tuple[int, ...]:
    """Return the layers of the target whose inputs the head reads, in its order, checked."""
    numbers = file.numbers("target_layers")
    if not numbers or not all(0 <= number < 1e6 and number == int(number) for number in numbers):
        raise MalformedFileError(
            f"{file.path} does not name the layers that it reads (eagle3.target_layers)"
        )
    taps = tuple(int(number) for number in numbers)
    if max(taps) >= target.n_layer:
        raise PairError(
            f"{file.path} cannot draft for {target.path}: it reads the input of layer {max(taps)}, "
            f"and the target has {target.n_layer} layers, the first of them layer 0"
        )
    check_layer_inputs(target, taps)
    return taps


def _eagle3_sizes(file: HeadFile, target: Model, n_taps: int) -> PairSizes:
    hidden, heads = file.size("embedding_length"), file.size("attention.head_count")
    kv = file.size("attention.head_count_kv", default=heads)
    head_size = file.size("attention.key_length", default=max(1, hidden // heads))
    if heads % kv or head_size != file.size("attention.value_length", default=head_size):
        raise MalformedFileError(
            f"{file.path} has {heads} heads and {kv} key-value heads of {head_size} numbers: "
            "convert it again"
        )
    own_output = "output.weight" in file
    vocab_size = file.shape("output.weight")[-1] if own_output else target.vocabulary.size
    return PairSizes(
        hidden=hidden,
        features=n_taps * target.n_embd,
        vocab_size=vocab_size,
        norm_eps=file.number("attention.layer_norm_rms_epsilon", 1e-6),
        attention=AttentionSizes(heads, kv, head_size, _rope(file, head_size)),
        n_layers=file.size("block_count", _MOST_LAYERS, default=1),
    )


def _rope(file: HeadFile, head_size: int) -> Rope:
    scaling = file.header.metadata.get("eagle3.rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} scales its positions by {scaling!r}: EAGLE-3 heads are run with none, "
            "linear, yarn or rope_freqs"
        )
    n_dims = file.size("rope.dimension_count", default=head_size)
    if n_dims % 2 or n_dims > head_size:
        raise MalformedFileError(
            f"{file.path} rotates {n_dims} of {head_size} numbers of a head: convert it again"
        )
    # Other scalings change the rotation by frequency; run as linear they would be silently wrong.
    factor = file.number("rope.scaling.factor", 1.0) if scaling != "none" else 1.0
    # Neighbouring pairs, as llama.cpp's converter has permuted the matrices: not neox.
    rope = Rope(n_dims, freq_base=file.number("rope.freq_base", 10000.0), freq_scale=1.0 / factor)
    if scaling != "yarn":
        return rope
    trained, magnitude = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
    return replace(rope, trained=file.size(trained), magnitude=file.number(magnitude, 1.0))


def _eagle3_tensor_names(
    file: HeadFile, sizes: PairSizes, target: Model, n_taps: int
) -> tuple[str, ...]:
    """Return all tensors of the file that are used, checked."""
    h, attention = sizes.hidden, sizes.attention
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (sizes.features, h),
        "blk.0.attn_norm_2.weight": (h,),
        "output_norm.weight": (h,),
    }
    if MASK_FEATURES in file:
        shapes[MASK_FEATURES] = (sizes.features,)
    if file.flag("norm_before_fc"):
        shapes[FEATURES_NORM] = (sizes.features,)
    if file.flag("fc_norm"):
        shapes |= {f"fc_norm.{tap}.weight": (target.n_embd,) for tap in range(n_taps)}
    if ROPE_FACTORS in file:
        shapes[ROPE_FACTORS] = (attention.rope.n_dims // 2,)
    if VOCABULARY_MAP in file:
        shapes[VOCABULARY_MAP] = (sizes.vocab_size,)
        kind = file.type_name(VOCABULARY_MAP)
        if kind != "I64":
            raise MalformedFileError(
                f"{file.path} has its vocabulary map (d2t) in {kind}, not in I64: convert it again"
            )
    # Without a map the head's token ids must be the target's.
    elif sizes.vocab_size != target.vocabulary.size:
        raise MalformedFileError(
            f"{file.path} predicts {sizes.vocab_size} tokens of the target's "
            f"{target.vocabulary.size}, and has no tensor d2t that names them"
        )
    shared = {"token_embd.weight": target.vocabulary.size, "output.weight": sizes.vocab_size}
    for name, vocab_size in shared.items():
        if name in file:
            shapes[name] = (h, vocab_size)
        elif h != target.n_embd:
            raise PairError(
                f"{file.path} cannot draft for {target.path}: it has no {name}, and the target's "
                f"is for states of {target.n_embd} numbers, not {h}"
            )
    names = [file.require(name, shape) for name, shape in shapes.items()]
    for layer in range(sizes.n_layers):
        # The first reads the embedding beside the state.
        reads, norms = h if layer else 2 * h, ("attn_norm", "ffn_norm")
        block = f"blk.{layer}."
        names += layer_tensor_names(file, block, attention, hidden=h, reads=reads, norms=norms)
    return tuple(names)


class Eagle3Head(PairHead):
    """The head of a file, for the target it was made for; the options are those of `PairHead`.

    Raises UnsupportedModelError for a target whose layer inputs llama.cpp does not hand out,
    PairError for one that the head was not made for, MalformedFileError for a file that contradicts
    itself.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        *,
        ranks: int,
        whole_rows: bool = False,
        n_threads: int = 0,
    ) -> None:
        file = HeadFile(path, "eagle3")
        self._layout = layout = read_layout(file, target)
        self.taps, self.mask, self.n_drafted = layout.taps, layout.mask, layout.n_drafted
        self.name = os.path.basename(file.path)
        self.mask_features: FloatRows | None = None
        if self.mask is not None:
            self.mask_features = read_numbers(path, MASK_FEATURES, np.float32).reshape(1, -1)
        ids = _target_ids(file, target) if VOCABULARY_MAP in file else None
        made = layout.tensors, "blk.0.", layout.sizes, target, None
        super().__init__(file, *made, ranks, whole_rows, n_threads)
        self._target_ids = ids

    def fused(self, builder: GraphBuilder, features: Tensor) -> Tensor:
        """Return the taps joined into states: norms if the head has them, then `fc`."""
        weights, eps = self._file, self.sizes.norm_eps
        norm = weights.get(FEATURES_NORM)
        if norm is not None:
            features = builder.rms_norm(features, norm, eps)
        if weights.get("fc_norm.0.weight") is not None:
            width = self.sizes.features // len(self.taps)
            normed = []
            for tap in range(len(self.taps)):
                own = builder.contiguous(builder.columns(features, tap * width, width))
                normed.append(builder.rms_norm(own, weights[f"fc_norm.{tap}.weight"], eps))
            features = functools.reduce(builder.concat, normed)
        return builder.mul_mat(weights["fc.weight"], features)

    def predicted(
        self, builder: GraphBuilder, tokens: Tensor, states: Tensor, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's result for [norm(embedding); norm(state)]; see the module."""
        eps, factors = self.sizes.norm_eps, self._file.get(ROPE_FACTORS)
        tokens = builder.rms_norm(tokens, self._layer["attn_norm.weight"], eps)
        normed = builder.rms_norm(states, self._layer["attn_norm_2.weight"], eps)
        residual = normed if self._layout.norm_before_residual else states
        x = builder.concat(tokens, normed)
        z = decoder_layer(builder, self._layer, x, residual, places, eps, factors)
        for layer in range(1, self.sizes.n_layers):
            weights = self.tensors(f"blk.{layer}.")
            x = builder.rms_norm(z, weights["attn_norm.weight"], eps)
            z = decoder_layer(builder, weights, x, z, places, eps, factors, layer)
        read = builder.rms_norm(z, self._file["output_norm.weight"], eps)
        # EAGLE-3.1 feeds the normed state back; the output matrix reads that in either case.
        return (read if self._layout.norm_output else z), read


def trained_window(file: HeadFile) -> int:
    """Return how many of the last pairs a file's head was trained to see; 1 << 30: all."""
    return file.size("attention.sliding_window", 1 << 30, default=1 << 30)


def is_head(path: str | os.PathLike[str]) -> bool:
    """Return whether a GGUF file holds heads, which are no model of their own."""
    return method_of_head(read_header(path).architecture) is not None


def check_head(path: str | os.PathLike[str], target: Model) -> None:
    """Raise the errors of opening a head for this target, without loading its weights.

    That is PairError, UnsupportedModelError or MalformedFileError.
    """
    file = HeadFile(path, read_header(path).architecture)
    if file.kind != "eagle3":
        file.check_target(target)
        if file.kind == "eagle":
            draft_vocabulary(file, target)
        return
    if VOCABULARY_MAP in read_layout(file, target).tensors:
        _target_ids(file, target)
