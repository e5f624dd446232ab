"""Files of block drafters, llama.cpp's architecture `dflash`: their generation, sizes and target.

All generations fuse inputs of some of the target's layers (`target_layers`) and predict the tokens
of a block at once: DFlash each for itself; DSpark adds a Markov head, which weighs a token by the
one before, and mostly a confidence head; DFlash2 adds a selector, which scores how well candidates
of neighbouring slots fit each other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from specrun.bindings.contexts import BLOCK_ARCHITECTURE, check_layer_inputs, layer_inputs
from specrun.bindings.errors import MalformedFileError, PairError, UnsupportedModelError
from specrun.bindings.ggml.weights import read_numbers
from specrun.bindings.gguf import ArrayValue
from specrun.bindings.models import Model
from specrun.runtime.heads import HeadFile

Generation = Literal["DFlash", "DFlash2", "DSpark"]

MarkovKind = Literal["vanilla", "gated", "rnn"]
"""How DSpark's Markov head makes a bias of the token before: as it is, gated by the slot's state,
or by a state of its own that has seen all tokens of the block."""

MARKOV_KIND = "markov_head_type"
MARKOV_WEIGHT, MARKOV_BIAS = "markov_head.weight", "markov_head.bias"
"""Keys of the gate's matrix and bias, or the state's; llama.cpp has no such tensors."""

MARKOV, CONFIDENCE, VOCABULARY_MAP = "markov_w1.weight", "conf_proj.weight", "d2t"
_SELECTOR = "selector_hidden.weight"
_MASK = "tokenizer.ggml.mask_token_id"
_USUAL_BLOCK = 16  # llama.cpp's, of a file that names none
_MOST_SLOTS = 256
# Blocks of DeepSeek-V4, whose tensors are that architecture's own.
_DEEPSEEK = "hyper_connection.count"
_KNOWN = re.compile(
    r"(token_embd|output|output_norm|enc\.output_norm|fc|rope_freqs)\.(weight|scale)"
    r"|markov_w[12]\.(weight|scale)|conf_proj\.(weight|bias)|d2t"
    r"|selector_(predecessor|successor|hidden)\.weight"
    r"|blk\.\d+\.((attn|ffn)_conv_(base|proj\.weight)"
    r"|(attn_(norm|q|k|v|output|q_norm|k_norm|sinks|post_norm)|post_attention_norm"
    r"|ffn_(norm|gate|up|down|post_norm)|post_ffw_norm|layer_output_scale)\.(weight|scale))"
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The kind of a drafter's blocks, by its file `title`.

    They predict `n_slots` tokens at most, and have `first` tokens more. They are made of inputs of
    the target's layers `taps`, in the drafter's own order. `few_tokens`: rows name a few tokens
    alone. `multiplied` of the `n_params` parameters are multiplied for each token.
    """

    title: str
    n_slots: int
    first: int
    taps: tuple[int, ...]
    n_params: int
    multiplied: float
    few_tokens: bool = False


@dataclass(frozen=True, slots=True)
class BlockFile:
    """The facts of a block drafter's file, checked for a target.

    A block has `block_size` tokens, the last one of the text and masks (the token `mask`); `first`
    is the number of the first that predicts one. `taps` are the target's layers whose inputs it
    reads, in its own order. `window` is how far back it sees, 0 if a layer sees the whole text.
    """

    path: str
    generation: Generation
    block_size: int
    first: int
    mask: int
    taps: tuple[int, ...]
    causal: bool
    top_k: int
    has_confidence: bool
    vocab_size: int
    window: int = 0
    head: MarkovKind = "vanilla"

    @property
    def n_slots(self) -> int:
        """How many tokens a block drafts."""
        return self.block_size - self.first

    @property
    def title(self) -> str:
        """The name of its file, and its generation."""
        return f"{os.path.basename(self.path)} ({self.generation})"

    def check_threshold(self, p_min: float) -> None:
        """Raise `UnsupportedModelError` if nothing in the file shows whether a chain is to end.

        DSpark's confidence head does, as in llama.cpp; for others it is the greatest probability.
        """
        if p_min and self.generation == "DSpark" and not self.has_confidence:
            problem = f"{self.path} has no confidence head, which p_min={p_min:g} is a threshold of"
            raise UnsupportedModelError(f"{problem}: leave out p_min (--spec-draft-p-min)")

    @staticmethod
    def read(path: str | os.PathLike[str], target: Model) -> BlockFile:
        """Read a file's header; an unknown file is then tried with the target, in a process.

        Raises `PairError` for another target, `MalformedFileError` for a file that contradicts
        itself, `UnsupportedModelError` for a generation that is not known, and for a target whose
        layers llama.cpp does not show.
        """
        file = HeadFile(path, BLOCK_ARCHITECTURE)
        generation = _generation(file)
        # DSpark's graph asserts that it is there.
        usual = None if generation == "DSpark" else _USUAL_BLOCK
        block_size = file.size("block_size", default=usual)
        in_place = generation == "DSpark" and file.flag("sample_from_anchor", default=True)
        if not 2 <= block_size <= _MOST_SLOTS:
            drafts = f"has a block of {block_size} tokens: give 2 to {_MOST_SLOTS}"
            raise MalformedFileError(f"{file.path} {drafts}, the last one of the text included")
        read = BlockFile(
            file.path,
            generation,
            block_size,
            0 if in_place else 1,
            _mask(file, target),
            _taps(file, target),
            file.flag("attention.causal"),
            file.size("selector_top_k", 64) if generation == "DFlash2" else 0,
            CONFIDENCE in file,
            target.vocabulary.size,
            _window(file),
            _markov_kind(file),
        )
        _check_map(file, target)
        file.check_target(target)
        return read


def _generation(file: HeadFile) -> Generation:
    """Return the generation of a file by its tensors, none of which may be unknown."""
    unknown = [tensor.name for tensor in file.header.tensors if not _KNOWN.fullmatch(tensor.name)]
    if unknown and f"{file.kind}.{_DEEPSEEK}" not in file.header.metadata:
        known = "DFlash, DFlash2 and DSpark have none of that name"
        problem = f"is a block drafter of an unknown generation: it has {unknown[0]}"
        raise UnsupportedModelError(f"{file.path} {problem}, and {known}")
    for tensor in file.header.tensors:
        # They are added number by number, which ggml does not do of blocks.
        if tensor.name.endswith("_conv_base") and tensor.type_name not in ("F32", "F16"):
            has = f"{file.path} has {tensor.name} in {tensor.type_name}"
            raise MalformedFileError(f"{has}, and llama.cpp needs it in F32: convert it again")
    if MARKOV in file and _SELECTOR in file:
        both = f"both a Markov head ({MARKOV}) and a selector ({_SELECTOR})"
        raise UnsupportedModelError(f"{file.path} has {both}: such a generation is not known")
    if _SELECTOR in file:
        return "DFlash2"
    return "DSpark" if MARKOV in file else "DFlash"


def _markov_kind(file: HeadFile) -> MarkovKind:
    """Return how a Markov head makes a bias of the token before."""
    kind = file.header.metadata.get(f"{file.kind}.{MARKOV_KIND}", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise UnsupportedModelError(f"{file.path} has a Markov head of an unknown type, {kind!r}")
    return cast("MarkovKind", kind)


def _window(file: HeadFile) -> int:
    """Return how many tokens back all layers see, 0 if one of them sees the whole text."""
    metadata, prefix = file.header.metadata, f"{file.kind}.attention.sliding_window"
    pattern = metadata.get(f"{prefix}_pattern")
    if not isinstance(pattern, ArrayValue) or not all(pattern) or prefix not in metadata:
        return 0
    return file.size("attention.sliding_window", 1 << 30)


def _check_map(file: HeadFile, target: Model) -> None:
    """Raise `MalformedFileError` for a draft vocabulary that names tokens the target lacks."""
    if VOCABULARY_MAP not in file:
        return
    if file.type_name(VOCABULARY_MAP) != "I64":
        kind = file.type_name(VOCABULARY_MAP)
        raise MalformedFileError(f"{file.path} has {VOCABULARY_MAP} in {kind}, and not in I64")
    tokens = read_numbers(file.path, VOCABULARY_MAP, np.int64)
    size = target.vocabulary.size
    if tokens.min() < 0 or tokens.max() >= size or len(np.unique(tokens)) < len(tokens):
        problem = f"has tokens twice, or outside the {size} of the target"
        raise MalformedFileError(f"{file.path}: its draft vocabulary ({VOCABULARY_MAP}) {problem}")


def _mask(file: HeadFile, target: Model) -> int:
    """Return the token that stands for those to predict."""
    mask = file.header.metadata.get(_MASK)
    if not isinstance(mask, int) or isinstance(mask, bool):
        raise MalformedFileError(f"{file.path} names no mask token ({_MASK}): convert it again")
    if not 0 <= mask < target.vocabulary.size:
        size = f"the target has {target.vocabulary.size} tokens"
        raise PairError(
            f"{file.path} cannot draft for {target.path}: its mask is {mask}, and {size}"
        )
    return mask


def _taps(file: HeadFile, target: Model) -> tuple[int, ...]:
    """Return the layers of the target whose inputs are read."""
    numbers = file.numbers("target_layers")
    if not numbers:
        raise MalformedFileError(
            f"{file.path} does not name the layers that it reads (target_layers)"
        )
    taps, width = tuple(int(number) for number in numbers), file.size("embedding_length")
    file.require("fc.weight", (len(taps) * width, width))
    last = layer_inputs(target) - 1
    if not all(0 <= tap <= last for tap in taps):
        reads = f"it reads the inputs of layers {', '.join(map(str, taps))}"
        has = f"the target has layers 0 to {last}"
        raise PairError(f"{file.path} cannot draft for {target.path}: {reads}, and {has}")
    check_layer_inputs(target, taps)
    return taps
