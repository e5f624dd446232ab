"""A model's vocabulary: text to tokens and back, special tokens, and comparison with another."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any

import numpy as np

from specrun.bindings.direct_calls import piece_function
from specrun.bindings.errors import ClosedError, OptionError
from specrun.bindings.gguf import ArrayValue, GGUFHeader
from specrun.bindings.library import llama

# llama_vocab_type
_KIND_NAMES = {0: "none", 1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLAMO2"}
STORED_KINDS = {
    "llama": "SPM",
    "gpt2": "BPE",
    "bert": "WPM",
    "t5": "UGM",
    "rwkv": "RWKV",
    "plamo2": "PLAMO2",
}
"""Kinds of vocabularies by the names that files have for them."""
_ATTRIBUTE_UNKNOWN = 1 << 0
_ATTRIBUTE_CONTROL = 1 << 3
_ATTRIBUTE_BYTE = 1 << 5
_ATTRIBUTE_STRIPS = 1 << 7 | 1 << 8
_WHITE_SPACE = b" \t\n\v\f\r"
_UTF8_BYTES = frozenset(bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5)))

_SPACE = "\u2581".encode()  # SentencePiece's sign for one
_GUARD = "\n"  # a tokenizer may add a space before a text: it goes to this


@dataclass(frozen=True, slots=True)
class FillTokens:
    """Control tokens around the texts before and behind a gap that a model fills.

    `repository` and `file` begin other files of the same repository, None if there are none.
    """

    before: int
    behind: int
    gap: int
    repository: int | None
    file: int | None


def stored_fingerprint(header: GGUFHeader) -> bytes | None:
    """Return `Vocabulary.fingerprint` of a file's header, None if it has no usual vocabulary."""
    name, tokens = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "tokens"))
    if not isinstance(tokens, ArrayValue) or tokens.element_type != "string" or not len(tokens):
        return None
    kind = STORED_KINDS.get(str(name))
    if kind is None:
        return None
    digest = hashlib.sha256(f"{kind} {len(tokens)}".encode())
    # The file has lengths of 8 bytes before the texts, of which the lower 4 are hashed.
    starts = np.concatenate([[0], tokens.string_ends()[:-1]])[: len(tokens)]
    kept = np.ones(len(tokens.raw), bool)
    kept[(starts[:, None] + np.arange(4, 8)).ravel()] = False
    digest.update(np.frombuffer(tokens.raw, np.uint8)[kept].tobytes())
    return digest.digest()


class _Pieces(dict[int, bytes]):
    """The bytes of a vocabulary's tokens, each read once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __missing__(self, token: int) -> bytes:
        vocabulary = self._vocabulary
        if not 0 <= token < vocabulary.size:
            vocabulary._check(token)
        handle = vocabulary._open_handle or vocabulary._handle
        piece = self[token] = vocabulary._piece_of(handle, token, False)
        return piece


class Vocabulary:
    """The vocabulary of one model. It lives as long as its `Model`, which owns its memory."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - a ctypes pointer
        self._native = llama()
        self._open_handle: Any = handle
        self.size: int = self._native.llama_vocab_n_tokens(handle)
        self.kind: str = _KIND_NAMES.get(self._native.llama_vocab_type(handle), "unknown")
        self.adds_bos: bool = bool(self._native.llama_vocab_get_add_bos(handle))
        self.adds_eos: bool = bool(self._native.llama_vocab_get_add_eos(handle))
        self._pieces = _Pieces(self)
        self._piece_of = piece_function()

    @property
    def _handle(self) -> Any:  # noqa: ANN401 - a ctypes pointer
        handle = self._open_handle  # read once: another thread may close it
        if handle is None:
            raise ClosedError("the model of this vocabulary is closed")
        return handle

    def close(self) -> None:
        """Forget the native vocabulary, which is the model's."""
        self._open_handle = None

    def _special(self, name: str) -> int | None:
        token = int(getattr(self._native, f"llama_vocab_{name}")(self._handle))
        return token if token >= 0 else None

    @functools.cached_property
    def bos(self) -> int | None:
        """The beginning-of-sequence token, or None."""
        return self._special("bos")

    @functools.cached_property
    def eos(self) -> int | None:
        """The end-of-sequence token, or None."""
        return self._special("eos")

    @functools.cached_property
    def fill_tokens(self) -> FillTokens | None:
        """The tokens for filling in the middle, or None."""
        names = ("fim_pre", "fim_suf", "fim_mid")
        before, behind, gap = (self._special(name) for name in names)
        if before is None or behind is None or gap is None:
            return None
        return FillTokens(before, behind, gap, self._special("fim_rep"), self._special("fim_sep"))

    @property
    def missing_token(self) -> str:
        """The name of a token that every text is to have and that is not there, or ""."""
        if self.kind not in ("SPM", "BPE", "UGM"):
            return ""
        asked = {"bos": self.adds_bos, "eos": self.adds_eos}
        # llama.cpp asserts that it is there when a text is read.
        return next((name for name in asked if asked[name] and self._special(name) is None), "")

    @functools.cached_property
    def end_of_generation(self) -> frozenset[int]:
        """Every token that ends an answer (eos, end of turn, end of message, ...)."""
        is_end = self._native.llama_vocab_is_eog
        ends = map(is_end, repeat(self._handle), range(self.size))
        return frozenset(compress(range(self.size), ends))

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Tokens that only tokenization with `parse_special` finds, with their texts.

        User-defined tokens are not among them: they are ordinary text, which llama.cpp always
        finds.
        """
        wanted = _ATTRIBUTE_CONTROL | _ATTRIBUTE_UNKNOWN
        attribute = self._native.llama_vocab_get_attr
        found = (token for token in range(self.size) if attribute(self._handle, token) & wanted)
        return {token: text for token in found if (text := self.text(token))}

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of special tokens, longest first."""
        return tuple(sorted({*self.special_tokens.values()}, key=len, reverse=True))

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 of kind and stored texts in order: equal if token ids mean the same."""
        get, handle = self._native.llama_vocab_get_text, self._handle
        digest = hashlib.sha256(f"{self.kind} {self.size}".encode())
        for token in range(self.size):
            text: bytes = get(handle, token) or b""
            digest.update(len(text).to_bytes(4, "little") + text)
        return digest.digest()

    def text(self, token: int) -> str:
        """Return the token's text as the file stores it (byte-level tokens stay encoded)."""
        self._check(token)
        raw: bytes | None = self._native.llama_vocab_get_text(self._handle, token)
        return (raw or b"").decode("utf-8", "replace")

    @functools.cached_property
    def _most_bytes(self) -> int:
        """The most bytes of a text for one token; 0 if there is no bound.

        Tokenizers of the two kinds leave nothing out, if the vocabulary has every byte (SPM refuses
        to load without). As it is stored, a token is as long as its text or longer.
        """
        get, handle, tokens = self._native.llama_vocab_get_text, self._handle, range(self.size)
        if self.kind == "BPE":
            pieces = {self._piece_of(handle, token, False) for token in tokens}
            if not pieces >= _UTF8_BYTES:
                return 0
        elif self.kind != "SPM":
            return 0
        return max(len(get(handle, token) or b"") for token in tokens)

    @functools.cached_property
    def strips(self) -> bool:
        """Whether white space next to some token is left out."""
        attribute, handle = self._native.llama_vocab_get_attr, self._handle
        return any(attribute(handle, token) & _ATTRIBUTE_STRIPS for token in range(self.size))

    def fewest_tokens(self, text: str) -> int:
        """Return a number that `tokenize` reaches for this text in any case, without reading it.

        It is the bytes over those of the longest token; 0 for a vocabulary that may leave text out.
        """
        if not self._most_bytes:
            return 0
        data = text.encode("utf-8", "replace")
        size = len(data.translate(None, _WHITE_SPACE)) if self.strips else len(data)
        return -(-size // self._most_bytes)

    def tokenize(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the tokens of `text`, which may be a piece of UTF-8 that ends in a character.

        `add_special` adds the model's bos and eos tokens; `parse_special` reads
        texts such as `<|end|>` as control tokens, which is never right for a user's text.
        """
        if not text and not add_special:
            return []
        if self._has_gaps:
            return self._tokenize_with_gaps(text, add_special, parse_special)
        return self._tokenize(text, add_special, parse_special)

    def _tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        capacity = len(data) + 8
        for _ in range(2):
            buffer = (ctypes.c_int32 * capacity)()
            count = self._native.llama_tokenize(
                self._handle, data, len(data), buffer, capacity, add_special, parse_special
            )
            if count >= 0:
                return list(buffer[:count])
            capacity = -count
        raise OptionError(f"a text of {len(data)} bytes is too long to tokenize: split it")

    @functools.cached_property
    def _has_gaps(self) -> bool:
        """Whether a SentencePiece vocabulary lacks bytes: llama.cpp ends the process for those."""
        if self.kind != "SPM":
            return False
        stored = self._stored_texts
        return any(
            b"<0x%02X>" % byte not in stored and bytes([byte]) not in stored for byte in range(256)
        )

    @functools.cached_property
    def _stored_texts(self) -> frozenset[bytes]:
        get, handle = self._native.llama_vocab_get_text, self._handle
        return frozenset(get(handle, token) or b"" for token in range(self.size))

    def _tokenize_with_gaps(
        self, text: str | bytes, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Return the tokens of a text, with the token of unknown text for each character without.

        Raises `OptionError` if the vocabulary has no such token.
        """
        decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        stored = self._stored_texts

        def is_known(character: str) -> bool:
            data = character.encode("utf-8", "replace")
            return data.replace(b" ", _SPACE) in stored or all(
                b"<0x%02X>" % byte in stored or bytes([byte]) in stored for byte in data
            )

        known = {character: is_known(character) for character in set(decoded)}
        names = "|".join(map(re.escape, self.special_texts)) if parse_special else ""
        tokens: list[int] = []
        for place, part in enumerate(re.split(f"({names})", decoded) if names else [decoded]):
            if place % 2:  # a control token's name
                tokens += self._tokenize(part, False, True)
                continue
            for is_readable, run in itertools.groupby(part, known.__getitem__):
                piece = "".join(run)
                if is_readable:
                    tokens += self._tokenize(piece, False, False)
                else:
                    tokens += [self._unknown_token(piece)] * len(piece)
        if not add_special:
            return tokens
        # An empty text has only the added tokens.
        added = self._tokenize("", True, False)
        is_first = bool(added) and added[0] == self.bos and self.adds_bos
        return [*added[:is_first], *tokens, *added[is_first:]]

    def _unknown_token(self, text: str) -> int:
        attribute = self._native.llama_vocab_get_attr
        for token in range(self.size):
            if attribute(self._handle, token) & _ATTRIBUTE_UNKNOWN:
                return token
        raise OptionError(f"this vocabulary has no token for {text[:20]!r}: leave it out")

    def tokenize_prompt(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Return the tokens of a text that a model is to continue, as its author wrote it.

        Texts such as `<|im_start|>` are control tokens, unless `parse_special` is False. There is
        one bos if the model needs one, also if the text has it already, and never an eos behind.
        """
        return self.with_bos(self.tokenize(text, add_special=False, parse_special=parse_special))

    def with_bos(self, tokens: list[int]) -> list[int]:
        """Return tokens that begin with the model's bos if it needs one; never with two."""
        if not self.adds_bos or self.bos is None or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]

    def tokenize_within(self, text: bytes) -> list[int]:
        """Return the tokens of a text in the middle of another: nothing is added before it."""
        if not text:
            return []
        decoded = text.decode("utf-8", "replace")
        ids = self.tokenize(_GUARD + decoded, add_special=False)
        skipped = 0
        for index, piece in enumerate(self.pieces(ids)):
            skipped += len(piece.lstrip(b" "))
            if skipped == len(_GUARD):
                return ids[index + 1 :]
            if skipped > len(_GUARD):
                break
        # The guard is a part of the first token: then the text alone.
        return self.tokenize(decoded, add_special=False)

    def piece(self, token: int) -> bytes:
        """Return the bytes of the token; control tokens have none.

        A character may be split over several tokens, so bytes are joined before they are decoded.
        """
        return self.pieces((token,))[0]

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each of these tokens."""
        return [*map(self._pieces.__getitem__, tokens)]

    def is_byte(self, token: int) -> bool:
        """Whether the token is a bare byte: tokenizers spell unknown texts with those."""
        self._check(token)
        return bool(self._native.llama_vocab_get_attr(self._handle, token) & _ATTRIBUTE_BYTE)

    def is_control(self, token: int) -> bool:
        """Whether the token is no text of its own: a control token, or that of unknown text."""
        self._check(token)
        wanted = _ATTRIBUTE_CONTROL | _ATTRIBUTE_UNKNOWN
        return bool(self._native.llama_vocab_get_attr(self._handle, token) & wanted)

    def named(self, token: int) -> bytes:
        """Return the bytes of the token, of control tokens those of their names."""
        self._check(token)
        return self._piece_of(self._handle, token, True)

    def label(self, token: int) -> str:
        """Return the token's text for messages: control tokens are shown by name."""
        return self.named(token).decode("utf-8", "replace")

    def spelled(self, token: int) -> bytes:
        """Return the text of a single token, as llama.cpp's DRY reads it.

        Control tokens are shown by name, and a space that only marks a text's beginning is left
        out.
        """
        self._check(token)
        whole, size = (ctypes.c_int32 * 1)(token), 64  # longer ones are rare
        for _ in range(2):
            buffer = (ctypes.c_char * size)()
            count = self._native.llama_detokenize(self._handle, whole, 1, buffer, size, False, True)
            if count >= 0:
                break
            size = -count
        return buffer.raw[:count]

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of `tokens`, control tokens left out, invalid UTF-8 replaced."""
        return b"".join(self.pieces(tokens)).decode("utf-8", "replace")

    def first_difference(self, other: Vocabulary, start: int) -> int | None:
        """Return the first common id from `start` on whose stored text differs, or None."""
        get = self._native.llama_vocab_get_text
        mine, theirs = self._handle, other._handle
        for token in range(start, min(self.size, other.size)):
            if get(mine, token) != get(theirs, token):
                return token
        return None

    def _check(self, token: int) -> None:
        if not 0 <= token < self.size:
            raise OptionError(f"token {token} is outside the vocabulary of {self.size} tokens")
