"""SentencePiece models (tokenizer.model): the pieces, their scores and kinds, the normalization.

The file is a protocol-buffers message (sentencepiece_model.proto): pieces in field 1, how it was
trained in field 2, how text is normalized in field 3. Read here because it is little, and a damaged
file is to be named.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import MalformedFileError
from specrun.convert.checkpoint import read_small_file

# Of a field's tag: how its value is stored.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Piece:
    """A token; `kind` is 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused or 6 byte."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The content of a tokenizer.model; `algorithm` is 1 unigram, 2 BPE, 3 word, 4 char.

    `special_ids` has the ids of "unknown", "bos", "eos" and "padding" if the model has these
    tokens. `has_character_map`: text is rewritten (NFKC and the like) before it is split.
    """

    pieces: tuple[Piece, ...]
    algorithm: int
    special_ids: dict[str, int]
    adds_space: bool
    has_character_map: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read the model at `path`; raises FileMissingError, MalformedFileError for something else."""
    data = read_small_file(path, "a SentencePiece model")
    return parse_sentencepiece(data, str(path))


def parse_sentencepiece(data: bytes, shown: str) -> SentencePieceModel:
    """Return the model in `data`; raises MalformedFileError, naming it `shown`, if it is none."""
    try:
        return _model(memoryview(data))
    except (ValueError, IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
        raise MalformedFileError(
            f"{shown} is not a SentencePiece model ({error}); get it again"
        ) from error


def _model(data: memoryview) -> SentencePieceModel:
    pieces: list[Piece] = []
    settings: dict[int, dict[int, int | memoryview]] = {2: {}, 3: {}}
    for field, value in _fields(data):
        if field not in (1, 2, 3):
            continue
        if not isinstance(value, memoryview):
            raise ValueError(f"field {field} is not a message")
        if field == 1:
            pieces.append(_piece(value))
        else:
            settings[field] = dict(_fields(value))
    trainer, normalizer = settings[2], settings[3]
    if not pieces:
        raise ValueError("it has no pieces")
    # Fields 40 to 43 of the trainer's settings; if they are absent, the format's usual ids.
    usual = {"unknown": 0, "bos": 1, "eos": 2, "padding": -1}
    ids = {name: _signed(trainer.get(40 + i, usual[name])) for i, name in enumerate(usual)}
    special = {name: token for name, token in ids.items() if 0 <= token < len(pieces)}
    return SentencePieceModel(
        pieces=tuple(pieces),
        algorithm=_signed(trainer.get(3, 1)),
        special_ids=special,
        adds_space=bool(normalizer.get(3, 1)),
        has_character_map=bool(normalizer.get(2)),
    )


def _piece(data: memoryview) -> Piece:
    fields = dict(_fields(data))
    text, score, kind = fields.get(1), fields.get(2), fields.get(3, 1)
    if not isinstance(text, memoryview) or not isinstance(kind, int) or not 1 <= kind <= 6:
        raise ValueError("a piece has no text or is of an unknown kind")
    number = struct.unpack("<f", score)[0] if isinstance(score, memoryview) else 0.0
    return Piece(bytes(text).decode("utf-8"), number, kind)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield each field's number and value: a number, or the bytes of anything longer."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        stored = tag & 7
        if stored == _VARINT:
            number, place = _varint(data, place)
            yield tag >> 3, number
            continue
        if stored == _BYTES:
            length, place = _varint(data, place)
        elif stored in (_FIXED64, _FIXED32):
            length = 8 if stored == _FIXED64 else 4
        else:
            raise ValueError(f"a field is stored in the unknown way {stored}")
        if place + length > len(data):
            raise ValueError("it is truncated")
        yield tag >> 3, data[place : place + length]
        place += length


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    number = 0
    for index in range(10):
        byte = data[place + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, place + index + 1
    raise ValueError("a number has more than ten bytes")


def _signed(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("a setting is not a number")
    return value - (1 << 64) if value >= 1 << 63 else value
