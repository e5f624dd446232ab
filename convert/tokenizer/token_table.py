"""Tokens of a checkpoint by id: the tokenizer's own, those added to it, padding; BPE merges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specrun.bindings.errors import MalformedFileError
from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.tokenizer.vocabulary import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

# Tokens that are marks whatever a checkpoint says of them: llama.cpp's converter takes them for
# control tokens too.
_MARKS = {"<pad>", "<mask>", "<2mass>", "[@BOS@]"}
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
        """Put added tokens over what is at their ids; `spaced` where a sign stands for spaces.

        A token that the model has no row for cannot be read or written by it, and is left out.
        """
        for extra in added:
            if extra.token >= len(self.tokens):
                continue
            control = extra.special or extra.text in _MARKS or _is_mark(extra.text)
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
