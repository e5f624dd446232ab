"""Vocabularies: as a GGUF file states them, and a checkpoint's tokens by id."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from specrun.bindings.errors import MalformedFileError, OptionError
from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.gguf import Metadata

# == Vocabularies of a GGUF file: byte-level BPE, and SentencePiece with scores ====================


# llama.cpp's token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class BytePairVocabulary:
    """The tokens of a byte-level BPE tokenizer, in the order of their ids.

    `types` has NORMAL, CONTROL, USER_DEFINED or UNUSED for each token; `merges` are "left right",
    the first first; `special_ids` maps names such as "bos", "eos", "padding" to ids; `pre` names
    the way text is split before merging, by llama.cpp's name. `chat_templates` have names, such
    as "default" and "tool_use".
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: Mapping[str, int] = field(default_factory=dict)
    pre: str = "gpt-2"
    add_bos: bool | None = False
    add_eos: bool | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)

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

    Two neighbours merge if together they are a token, the one of the highest score first; the
    rest is written as byte tokens (`<0x0A>`, type BYTE). `add_space` is whether
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
    chat_templates: Mapping[str, str] = field(default_factory=dict)

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
    templates = dict(vocabulary.chat_templates)
    if (usual := templates.pop("default", None)) is not None:
        metadata.text("tokenizer.chat_template", usual)
    if templates:  # llama.cpp's keys have these names
        named = {re.sub(r"\W", "_", name): text for name, text in templates.items()}
        metadata.texts("tokenizer.chat_templates", tuple(named))
        for name, text in named.items():
            metadata.text(f"tokenizer.chat_template.{name}", text)


@functools.cache
def byte_tokens() -> tuple[str, ...]:
    """Return the character of each of the 256 bytes in a byte-level vocabulary.

    Bytes that Latin-1 prints are their own; the others take the code points from 256 on, in
    order.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printed else next(others)) for byte in range(256))


# == Tokens of a checkpoint by id: the tokenizer's own, added ones, padding; BPE merges ============


# Tokens that are marks for any checkpoint: llama.cpp's converter takes them for
# control tokens too.
_MARKS = {"<pad>", "<mask>", "<2mass>", "[@BOS@]"}
# Gemma 4's marks of reasoning and of calls, which are to be written out.
_WRITTEN = {"<|channel>", "<channel|>", '<|"|>', "<|tool_call>", "<tool_call|>"}
_WRITTEN |= {"<|tool_response>", "<tool_response|>"}
_MARK_ENDS = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
SPACE = "▁"  # SentencePiece's sign for a space
_ADDED_SCORE = -1000.0


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token added to a tokenizer; `special` ones are never part of ordinary text."""

    text: str
    token: int
    special: bool


class TokenTable:
    """A table of `size` tokens, filled id by id; `shown` names the file in messages."""

    def __init__(self, size: int, shown: str) -> None:
        self.shown = shown
        self.tokens: list[str | None] = [None] * size
        self.types = [UNUSED] * size
        self.scores = [-10000.0] * size

    def place(self, text: str, token: object, kind: int = NORMAL, score: float = 0.0) -> None:
        """Put a tokenizer's own token at its id; raises MalformedFileError if taken or outside."""
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise MalformedFileError(
                f"{self.shown} gives {text[:40]!r} the id {token!r}, outside the model's "
                f"{len(self.tokens)} tokens"
            )
        known = self.tokens[token]
        if known is not None and known != text:
            raise MalformedFileError(
                f"{self.shown} gives the id {token} to {known[:40]!r} and {text[:40]!r}"
            )
        self.tokens[token], self.types[token], self.scores[token] = text, kind, score

    def add(self, added: Iterable[AddedToken], *, spaced: bool = False) -> None:
        """Put added tokens over those at their ids; `spaced` if a sign replaces spaces.

        A token that the model has no row for cannot be read or written by it, and is left out.
        """
        for extra in added:
            if extra.token >= len(self.tokens):
                continue
            control = extra.special or extra.text in _MARKS or _is_mark(extra.text)
            control = control and extra.text not in _WRITTEN
            text = extra.text if control or not spaced else extra.text.replace(SPACE, " ")
            self.tokens[extra.token] = text
            if self.types[extra.token] != UNKNOWN:
                self.types[extra.token] = CONTROL if control else USER_DEFINED
            self.scores[extra.token] = _ADDED_SCORE

    def filled(self) -> tuple[str, ...]:
        """Return the tokens; ids without one, as embeddings rounded up have, are called [PADn]."""
        named = enumerate(self.tokens)
        return tuple(f"[PAD{token}]" if text is None else text for token, text in named)


def added_tokens(
    checkpoint: Checkpoint, tokenizer: JsonObject, settings: JsonObject
) -> Iterator[AddedToken]:
    """Yield the tokens that the checkpoint's three files add to the tokenizer, each id once."""
    seen: set[int] = set()
    for extra in _all_added(checkpoint, tokenizer, settings):
        if extra.token not in seen:
            seen.add(extra.token)
            yield extra


def _all_added(
    checkpoint: Checkpoint, tokenizer: JsonObject, settings: JsonObject
) -> Iterator[AddedToken]:
    for value in tokenizer.items("added_tokens"):
        named = f"an added token in {tokenizer.shown}"
        entry = JsonObject(value if isinstance(value, dict) else {}, named)
        yield _added(entry, entry.any("id"), entry.shown)
    decoder = settings.object("added_tokens_decoder")
    for key in decoder.values:
        yield _added(decoder.object(key), key, decoder.shown)
    names = checkpoint.optional("added_tokens.json")
    for text, token in names.values.items():
        yield AddedToken(text, _id(token, names.shown), False)


def _added(entry: JsonObject, token: object, shown: str) -> AddedToken:
    return AddedToken(entry.text("content"), _id(token, shown), entry.flag("special", False))


def _id(value: object, shown: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    if type(value) is not int or value < 0:
        raise MalformedFileError(f"{shown} has the id {str(value)[:40]!r}, which is not a token id")
    return value


def _is_mark(text: str) -> bool:
    return any(text.startswith(start) and text.endswith(end) for start, end in _MARK_ENDS)


def read_merges(tokenizer: JsonObject) -> list[tuple[str, str]]:
    """Return the pairs to merge, in order; raises MalformedFileError for none, or no pairs."""
    merges: list[tuple[str, str]] = []
    for entry in tokenizer.object("model").items("merges"):
        # Before transformers 4.45 a merge was one string.
        parts = entry.split(" ") if isinstance(entry, str) else entry
        match parts:
            case [str(left), str(right)] if left and right:
                merges.append((left, right))
            case _:
                raise tokenizer.malformed(f"has a merge {str(entry)[:60]!r}, not two tokens")
    if not merges:
        raise tokenizer.malformed("has no merges, which a BPE tokenizer needs")
    return merges
