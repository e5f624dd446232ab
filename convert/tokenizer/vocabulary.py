"""Vocabularies as a GGUF file states them: byte-level BPE, and SentencePiece with scores."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from specrun.bindings.errors import OptionError
from specrun.convert.gguf import Metadata

# llama.cpp's token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class BytePairVocabulary:
    """The tokens of a byte-level BPE tokenizer, in the order of their ids.

    `types` has NORMAL, CONTROL, USER_DEFINED or UNUSED for each token; `merges` are "left right",
    the first first; `special_ids` maps names such as "bos", "eos", "padding" to ids; `pre` names
    the way text is split before merging, as llama.cpp knows it.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: Mapping[str, int] = field(default_factory=dict)
    pre: str = "gpt-2"
    add_bos: bool | None = False
    add_eos: bool | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        _check(self.tokens, self.types, self.special_ids)

    def describe(self, metadata: Metadata) -> None:
        """Add the tokenizer's keys to `metadata`."""
        metadata.text("tokenizer.ggml.model", "gpt2")
        metadata.text("tokenizer.ggml.pre", self.pre)
        metadata.texts("tokenizer.ggml.tokens", self.tokens)
        metadata.integers("tokenizer.ggml.token_type", self.types)
        # llama.cpp refuses a file without merges: that of two zero bytes, in no text, is safe.
        zero = byte_tokens()[0]
        metadata.texts("tokenizer.ggml.merges", self.merges or (f"{zero} {zero}",))
        _describe_special(self, metadata)


@dataclass(frozen=True, slots=True)
class ScoredVocabulary:
    """The tokens of a SentencePiece tokenizer (BPE by scores), in the order of their ids.

    Two neighbours merge where together they are a token, the one of the highest score first; what
    is no token in the end is written as byte tokens (`<0x0A>`, type BYTE). `add_space` is whether
    text gets a space in front. Raises OptionError if a byte token is missing: llama.cpp ends the
    process when it needs that one.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    special_ids: Mapping[str, int] = field(default_factory=dict)
    add_space: bool = True
    add_bos: bool | None = True
    add_eos: bool | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        _check(self.tokens, self.types, self.special_ids)
        if len(self.scores) != len(self.tokens):
            raise OptionError(f"a table of {len(self.tokens)} tokens has {len(self.scores)} scores")
        missing = {f"<0x{byte:02X}>" for byte in range(256)}.difference(self.tokens)
        if missing:
            raise OptionError(f"no byte token {min(missing)} is there, which llama.cpp needs")

    def describe(self, metadata: Metadata) -> None:
        """Add the tokenizer's keys to `metadata`."""
        metadata.text("tokenizer.ggml.model", "llama")
        metadata.text("tokenizer.ggml.pre", "default")
        metadata.texts("tokenizer.ggml.tokens", self.tokens)
        metadata.numbers("tokenizer.ggml.scores", self.scores)
        metadata.integers("tokenizer.ggml.token_type", self.types)
        metadata.flag("tokenizer.ggml.add_space_prefix", self.add_space)
        _describe_special(self, metadata)


Vocabulary = BytePairVocabulary | ScoredVocabulary
"""The tokens of a tokenizer, in the order of their ids, ready to be written."""


def _check(tokens: tuple[str, ...], types: tuple[int, ...], special_ids: Mapping[str, int]) -> None:
    if len(types) != len(tokens):
        raise OptionError(f"a vocabulary of {len(tokens)} tokens has {len(types)} token types")
    for name, token in special_ids.items():
        if not 0 <= token < len(tokens):
            raise OptionError(f"the {name} token {token} is outside a vocabulary of {len(tokens)}")


def _describe_special(vocabulary: Vocabulary, metadata: Metadata) -> None:
    for name, token in vocabulary.special_ids.items():
        metadata.count(f"tokenizer.ggml.{name}_token_id", token)
    for name, added in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos)):
        if added is not None:
            metadata.flag(f"tokenizer.ggml.add_{name}_token", added)
    if vocabulary.chat_template is not None:
        metadata.text("tokenizer.chat_template", vocabulary.chat_template)


@functools.cache
def byte_tokens() -> tuple[str, ...]:
    """Return the character that stands for each of the 256 bytes in a byte-level vocabulary.

    Bytes that Latin-1 prints stand for themselves; the others take the code points from 256 on, in
    order.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printed else next(others)) for byte in range(256))
