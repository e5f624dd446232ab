"""Byte-level BPE vocabularies, as a GGUF file states them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from specrun.bindings.errors import OptionError
from specrun.convert.metadata import Metadata

__all__ = ["CONTROL", "NORMAL", "UNUSED", "USER_DEFINED", "BytePairVocabulary", "byte_words"]

# llama.cpp's token types
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


@dataclass(frozen=True, slots=True)
class BytePairVocabulary:
    """The words of a byte-level BPE tokenizer, in the order of their ids.

    `types` has NORMAL, CONTROL, USER_DEFINED or UNUSED for each word; `merges` are "left right", the first
    first; `special_ids` maps names such as "bos", "eos", "padding" to ids; `pre` names the way text is split
    before merging, as llama.cpp knows it.
    """

    words: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: Mapping[str, int] = field(default_factory=dict)
    pre: str = "gpt-2"
    add_bos: bool | None = False
    add_eos: bool | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if len(self.types) != len(self.words):
            raise OptionError(f"a vocabulary of {len(self.words)} words has {len(self.types)} word types")
        for name, token in self.special_ids.items():
            if not 0 <= token < len(self.words):
                raise OptionError(f"the {name} token {token} is outside a vocabulary of {len(self.words)} words")

    def describe(self, metadata: Metadata) -> None:
        """Add the tokenizer's keys to `metadata`."""
        metadata.text("tokenizer.ggml.model", "gpt2")
        metadata.text("tokenizer.ggml.pre", self.pre)
        metadata.texts("tokenizer.ggml.tokens", self.words)
        metadata.integers("tokenizer.ggml.token_type", self.types)
        # llama.cpp refuses a file without merges: one of two zero bytes, which no text has, does no harm.
        metadata.texts("tokenizer.ggml.merges", self.merges or (f"{byte_words()[0]} {byte_words()[0]}",))
        for name, token in self.special_ids.items():
            metadata.count(f"tokenizer.ggml.{name}_token_id", token)
        for name, added in (("bos", self.add_bos), ("eos", self.add_eos)):
            if added is not None:
                metadata.flag(f"tokenizer.ggml.add_{name}_token", added)
        if self.chat_template is not None:
            metadata.text("tokenizer.chat_template", self.chat_template)


@functools.cache
def byte_words() -> tuple[str, ...]:
    """Return the character that stands for each of the 256 bytes in a byte-level vocabulary.

    Bytes that Latin-1 prints stand for themselves; the others take the code points from 256 on, in order.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printed else next(others)) for byte in range(256))
