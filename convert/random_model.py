"""Llama models with random weights, for tests and for measuring the cost of a model's size.

Tensors are drawn, and quantized, a piece at a time."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.quantizer import quantize_rows
from specrun.convert.gguf import STORED_TYPES, Metadata, PlannedTensor, write_gguf
from specrun.convert.tokenizer import BytePairVocabulary
from specrun.convert.tokenizer.vocabulary import CONTROL, NORMAL, byte_tokens

# == Byte-level BPE vocabularies of any size without a corpus ======================================


_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# The first tokens of a vocabulary too small for every byte: enough to write words and lines.
_PREFERRED = " \n" + _LETTERS + ".,?!'-" + "0123456789" + _LETTERS.upper()


def synthetic_vocabulary(
    size: int,
    *,
    controls: Sequence[str] = ("<|end|>",),
    eos: str = "<|end|>",
    chat_template: str | None = None,
) -> BytePairVocabulary:
    """Return a vocabulary of exactly `size` tokens, the control tokens `controls` last.

    With room for all 256 bytes, token i < 256 is byte i, and made-up tokens of two letters and more
    follow with the merges that build them. A smaller one has the space, the newline, letters and so
    on, as far as there is room; text outside it is left out by the tokenizer. Raises OptionError
    for sizes without room for one token, and if `eos` is not one of `controls`.
    """
    if eos not in controls:
        raise OptionError(f"the end token {eos!r} is not among the controls {', '.join(controls)}")
    if len(set(controls)) != len(controls):
        raise OptionError(f"a control token is there twice: {', '.join(controls)}")
    room = size - len(controls)
    if room < 1:
        raise OptionError(
            f"a vocabulary of {size} tokens has no room beside {len(controls)} control tokens"
        )
    end = room + list(controls).index(eos)
    tokens, merges = _with_all_bytes(room) if room >= 256 else (_few_bytes(room), [])
    return BytePairVocabulary(
        tokens=(*tokens, *controls),
        types=(NORMAL,) * room + (CONTROL,) * len(controls),
        merges=tuple(merges),
        # If a file names no bos, llama.cpp would take token 11; as in GPT-2, eos serves as both.
        special_ids={"bos": end, "eos": end},
        chat_templates={} if chat_template is None else {"default": chat_template},
    )


def _few_bytes(room: int) -> list[str]:
    table = byte_tokens()
    preferred = list(_PREFERRED.encode())
    rest = (byte for byte in range(256) if byte not in preferred)
    return [table[byte] for byte in islice(chain(preferred, rest), room)]


def _with_all_bytes(room: int) -> tuple[list[str], list[str]]:
    pairs = list(islice(_merges(byte_tokens()[ord(" ")]), room - 256))
    if len(pairs) < room - 256:
        raise OptionError(f"a synthetic vocabulary has at most {len(pairs) + 256}, not {room}")
    tokens = [*byte_tokens(), *(left + right for left, right in pairs)]
    return tokens, [f"{left} {right}" for left, right in pairs]


def _merges(space: str) -> Iterator[tuple[str, str]]:
    """Yield all merges, each of two tokens that are there before it; short tokens come first."""
    twos = [a + b for a, b in product(_LETTERS, repeat=2)]
    yield from product(_LETTERS, _LETTERS)
    yield from product([space], _LETTERS)
    yield from product([space], twos)
    yield from product(twos, _LETTERS)
    yield from product([space], (two + letter for two, letter in product(twos, _LETTERS)))
    yield from product(twos, twos)


# == Models ========================================================================================
#
# Tensors are drawn, and quantized, a piece at a time.


_PIECE = 1 << 22  # numbers drawn at a time


def random_matrix(
    name: str, shape: tuple[int, int], type_name: str, *, seed: int, spread: float
) -> PlannedTensor:
    """Return a matrix of N(0, `spread`²) numbers, of F32, F16 or a quantized type.

    Same name, shape, seed and spread, same numbers, whatever else a file holds. Quantized types
    need rows that their blocks divide; writing raises OptionError for others.
    """

    def load() -> Iterator[npt.NDArray[Any]]:
        source = _source(seed, name)
        rows = max(1, _PIECE // shape[1])
        for start in range(0, shape[0], rows):
            piece = (min(rows, shape[0] - start), shape[1])
            numbers = source.standard_normal(piece, dtype=np.float32) * np.float32(spread)
            if type_name in STORED_TYPES:
                yield numbers.astype(STORED_TYPES[type_name])
            else:
                yield quantize_rows(numbers, type_name)

    return PlannedTensor(f"{name}.weight", shape, type_name, load)


def random_vector(
    name: str, size: int, *, seed: int, mean: float, spread: float, part: str = "weight"
) -> PlannedTensor:
    """Return a float32 vector of N(`mean`, `spread`²) numbers; `part` is "weight" or "bias"."""

    def load() -> npt.NDArray[Any]:
        numbers = _source(seed, name).standard_normal((size,), dtype=np.float32)
        return np.float32(mean) + np.float32(spread) * numbers

    return PlannedTensor(f"{name}.{part}", (size,), "F32", load)


def _source(seed: int, name: str) -> np.random.Generator:
    # Seeded by name too, so that a tensor does not depend on which were drawn before it.
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}  # llama_ftype
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RandomLlama:
    """The shape and the randomness of a model for `write_random_llama`.

    `scale` is the standard deviation of the logits, in nats: 0 makes every token equally likely, 1
    leaves about ln(vocab_size) - 1/2 nats of entropy, 5 and more gives nearly certain tokens. Two
    models of one shape and seed with different scales have the same most likely tokens: a target
    with a flatter drafter.

    `width` is the hidden size (divisible by `heads`), `ffn` the width between, `context` the
    context length. `tied` leaves out the output matrix, so that the embeddings are used.
    `controls`, the last tokens, are control tokens, among them `eos`; `vocabulary` replaces the
    synthetic one (see `synthetic_vocabulary`) and then decides size, control tokens and template.
    Q8_0 needs widths divisible by 32, quantizing further by 256. With `experts` every layer has so
    many, of which a token uses `experts_used`; `ffn` is the width of each.
    """

    vocab_size: int = 64
    width: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 64
    context: int = 512
    seed: int = 0
    scale: float = 1.0
    architecture: Literal["llama"] = "llama"
    file_type: Literal["F32", "F16", "Q8_0"] = "F32"
    tied: bool = False
    controls: tuple[str, ...] = ("<|end|>",)
    eos: str = "<|end|>"
    chat_template: str | None = None
    vocabulary: BytePairVocabulary | None = None
    experts: int = 0
    experts_used: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "ffn", "context"):
            if not 1 <= getattr(self, name) <= _LARGEST:
                raise OptionError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.architecture != "llama":
            raise OptionError(f"architecture is {self.architecture!r}: only 'llama' can be random")
        if self.file_type not in _FILE_TYPES:
            raise OptionError(f"file_type is {self.file_type!r}: use F32, F16, Q8_0 or quantize it")
        if self.file_type == "Q8_0" and (self.width % 32 or self.ffn % 32):
            raise OptionError(f"width {self.width} and ffn {self.ffn} are no blocks of 32 numbers")
        if not 0 <= self.experts_used <= self.experts or bool(self.experts) > self.experts_used:
            used = f"{self.experts_used} of {self.experts} experts"
            raise OptionError(f"a token uses {used}: give 1 to as many as there are, or 0 of 0")
        if self.seed < 0:
            raise OptionError(f"seed is {self.seed}: give 0 or more")
        if not 0 <= self.scale < float("inf"):
            raise OptionError(f"scale is {self.scale}: give 0 (equally likely tokens) or more")
        if self.width % self.heads or self.width // self.heads % 2:
            raise OptionError(f"width {self.width} is not {self.heads} heads of an even width")
        if self.heads % self.kv_heads:
            raise OptionError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly")

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads


def write_random_llama(
    path: str | os.PathLike[str], spec: RandomLlama, *, force: bool = False
) -> None:
    """Write a GGUF model with the shape of `spec` and weights from its seed; same spec, same bytes.

    Raises OptionError if `path` exists and `force` is not given.
    """
    vocabulary = spec.vocabulary or synthetic_vocabulary(
        spec.vocab_size, controls=spec.controls, eos=spec.eos, chat_template=spec.chat_template
    )
    size = len(vocabulary.tokens)
    metadata = _describe(spec, size)
    vocabulary.describe(metadata)
    write_gguf(path, spec.architecture, metadata, list(_tensors(spec, size)), force=force)


def _describe(spec: RandomLlama, vocab_size: int) -> Metadata:
    metadata = Metadata()
    metadata.text("general.name", f"random {spec.architecture} {spec.seed}")
    metadata.count("general.file_type", _FILE_TYPES[spec.file_type])
    prefix = spec.architecture
    metadata.counts(prefix, vocab_size=vocab_size, context_length=spec.context)
    metadata.counts(prefix, embedding_length=spec.width, feed_forward_length=spec.ffn)
    metadata.count(f"{prefix}.block_count", spec.layers)
    metadata.counts(f"{prefix}.attention", head_count=spec.heads, head_count_kv=spec.kv_heads)
    metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon", 1e-5)
    if spec.experts:
        metadata.counts(prefix, expert_count=spec.experts, expert_used_count=spec.experts_used)
    metadata.count(f"{prefix}.rope.dimension_count", spec.head_width)
    metadata.number(f"{prefix}.rope.freq_base", 10000.0)
    return metadata


def _tensors(spec: RandomLlama, vocab_size: int) -> Iterator[PlannedTensor]:
    width, ffn, kv_width = spec.width, spec.ffn, spec.kv_heads * spec.head_width
    # Every hidden state is normed to 1 before the output: its rows alone decide the logits' spread.
    spread = spec.scale / width**0.5
    yield _matrix(spec, "token_embd", (vocab_size, width), spread if spec.tied else 1.0)
    yield _norm(spec, "output_norm", 0.0)
    if not spec.tied:
        yield _matrix(spec, "output", (vocab_size, width), spread)
    for layer in range(spec.layers):
        block = f"blk.{layer}"
        yield _norm(spec, f"{block}.attn_norm", 0.1)
        yield _matrix(spec, f"{block}.attn_q", (width, width))
        yield _matrix(spec, f"{block}.attn_k", (kv_width, width))
        yield _matrix(spec, f"{block}.attn_v", (kv_width, width))
        yield _matrix(spec, f"{block}.attn_output", (width, width))
        yield _norm(spec, f"{block}.ffn_norm", 0.1)
        if spec.experts:
            yield from _experts(spec, block)
            continue
        yield _matrix(spec, f"{block}.ffn_gate", (ffn, width))
        yield _matrix(spec, f"{block}.ffn_up", (ffn, width))
        yield _matrix(spec, f"{block}.ffn_down", (width, ffn))


def _experts(spec: RandomLlama, block: str) -> Iterator[PlannedTensor]:
    """Yield a router, and the experts' matrices, those of a kind in one tensor."""
    router = (spec.experts, spec.width)
    yield random_matrix(
        f"{block}.ffn_gate_inp", router, "F32", seed=spec.seed, spread=spec.width**-0.5
    )
    shapes = {"gate": (spec.ffn, spec.width), "up": (spec.ffn, spec.width)}
    for name, (rows, columns) in {**shapes, "down": (spec.width, spec.ffn)}.items():
        made = _matrix(spec, f"{block}.ffn_{name}_exps", (spec.experts * rows, columns))
        yield dataclasses.replace(made, shape=(spec.experts, rows, columns))


def _matrix(
    spec: RandomLlama, name: str, shape: tuple[int, int], spread: float | None = None
) -> PlannedTensor:
    wanted = shape[1] ** -0.5 if spread is None else spread
    return random_matrix(name, shape, spec.file_type, seed=spec.seed, spread=wanted)


def _norm(spec: RandomLlama, name: str, spread: float) -> PlannedTensor:
    return random_vector(name, spec.width, seed=spec.seed, mean=1.0, spread=spread)
