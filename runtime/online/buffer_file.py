"""Replay buffers of online speculative decoding on disk: in the user's state folder, when asked.

The file is little-endian, versioned, bound to one target, and written whole or not at all:

    magic "SPECLEARN" | version u8 | length u32 of the facts | the facts, JSON
    of each answer: tokens i32 | positions i32 | ids i32 [n, K] | logarithms f16 [n, K + 1]
    SHA-256 of all before

Only its owner can read it: it holds what was asked and answered.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrun.bindings.atomic import atomic_path, state_folder
from specrun.bindings.errors import FileMissingError, MalformedFileError, ModelError
from specrun.bindings.kept_file import DAMAGE, count_in, json_object, list_in, text_in
from specrun.bindings.models.model import Model
from specrun.bindings.regular_file import read_regular
from specrun.runtime.costs.tuned import describe_file
from specrun.runtime.online.rejections import KeptLaws, RejectedAnswer, RejectionBuffer

_MAGIC = b"SPECLEARN"
_VERSION = 1
_HEAD = struct.Struct("<9sBI")
_DIGEST = 32
MOST_BYTES = 1 << 30
"""The most bytes of a file."""
BUFFER_NAME = "buffer.bin"
"""The file of a buffer in its target's folder."""


@dataclass(frozen=True, slots=True)
class BufferKey:
    """The target that a buffer belongs to: `model` is a hash of its file, `vocabulary` of tokens.

    `name` is the file's, for users to know it by.
    """

    name: str
    model: str
    vocabulary: str
    n_tokens: int

    @classmethod
    def of(cls, target: Model) -> BufferKey:
        """Return the key of an open target."""
        described = json.dumps(describe_file(target.path), sort_keys=True)
        digest = hashlib.sha256(described.encode()).hexdigest()
        vocabulary = target.vocabulary
        return cls(target.path.name, digest, vocabulary.fingerprint.hex(), vocabulary.size)


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """What a buffer's file says of itself, without its texts."""

    path: Path
    key: BufferKey
    n_answers: int
    n_places: int
    n_bytes: int


def learn_folder(key: BufferKey) -> Path:
    """Return where what is learnt for a target is kept: its buffer and its drafters."""
    return state_folder() / "learn" / f"{Path(key.name).stem[:40]}-{key.model[:16]}"


def kept_folders() -> list[Path]:
    """Return the folders of all targets that something is kept for."""
    root = state_folder() / "learn"
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def save_rejections(buffer: RejectionBuffer, path: Path, key: BufferKey) -> None:
    """Write a buffer over `path`; after a crash at any moment the old file or the new one is there.

    Raises SpecrunError if the disk is full or the folder cannot be written.
    """
    answers = list(buffer)
    sizes = [[len(answer.tokens), len(answer.positions)] for answer in answers]
    kept = answers[0].laws.ids.shape[1] if answers else buffer.kept_tokens
    facts = json.dumps({"target": asdict(key), "kept": kept, "answers": sizes}).encode()
    content = bytearray(_HEAD.pack(_MAGIC, _VERSION, len(facts)) + facts)
    for answer in answers:
        for array, kind in _arrays(answer):
            content += np.ascontiguousarray(array, kind).tobytes()
    content += hashlib.sha256(content).digest()
    with atomic_path(path, force=True) as aside:
        aside.chmod(0o600)
        aside.write_bytes(content)


def load_rejections(path: Path, key: BufferKey | None, buffer: RejectionBuffer) -> BufferKey:
    """Add the answers of a file to `buffer`, and return whose they are.

    Raises FileMissingError, MalformedFileError for a file that is no buffer, damaged or of another
    version, and ModelError for one of another target than `key` (None: of any).
    """
    return parse_rejections(path, _read(path), key, buffer)


def parse_rejections(
    path: Path, content: bytes, key: BufferKey | None, buffer: RejectionBuffer
) -> BufferKey:
    """Do what `load_rejections` does with the `content` of the file `path`."""
    facts = _facts(path, content)
    if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
        raise _malformed(path, "is damaged (its checksum is wrong)")
    try:
        found = _key(facts["target"])
        kept = count_in(facts["kept"], 1)
        sizes = [(count_in(t, 1), count_in(p, 1)) for t, p in list_in(facts["answers"])]
    except DAMAGE:
        raise _malformed(path, "contradicts itself") from None
    require_same_target(path, found, key)
    start = _HEAD.size + int.from_bytes(content[10:14], "little")
    expected = start + sum(_size(t, p, kept) for t, p in sizes) + _DIGEST
    if len(content) != expected:
        raise _malformed(path, f"has {len(content)} bytes instead of {expected}")
    buffer.kept_tokens = kept
    for answer in _answers(content, start, sizes, kept):
        if not _is_sound(answer, found.n_tokens):
            raise _malformed(path, "contradicts itself")
        buffer.add(answer)
    return found


def _key(value: Mapping[str, Any]) -> BufferKey:
    key = BufferKey(**value)
    for text in (key.name, key.model, key.vocabulary):
        text_in(text)
    count_in(key.n_tokens, 1)
    return key


def require_same_target(path: Path, found: BufferKey, wanted: BufferKey | None) -> None:
    """Raise ModelError unless a buffer belongs to the target that is asked for."""
    if wanted is not None and found.model != wanted.model:
        raise ModelError(
            f"{path} holds what drafts for {found.name} got wrong (hash {found.model[:12]}), and "
            f"the target is {wanted.name} (hash {wanted.model[:12]}): give each target its own"
        )


def read_facts(path: Path) -> BufferFacts:
    """Return what a buffer's file says of itself; raises as `load_rejections`."""
    buffer = RejectionBuffer(most_bytes=MOST_BYTES)
    key = load_rejections(path, None, buffer)
    return BufferFacts(path, key, len(buffer), buffer.n_places, path.stat().st_size)


def _arrays(answer: RejectedAnswer) -> list[tuple[Any, str]]:
    laws = answer.laws
    return [
        *((answer.tokens, "<i4"), (answer.positions, "<i4")),
        *((laws.ids, "<i4"), (laws.log_probs, "<f2")),
    ]


def _size(n_tokens: int, n_places: int, kept: int) -> int:
    return 4 * n_tokens + n_places * (4 + 4 * kept + 2 * (kept + 1))


def _answers(
    content: bytes, start: int, sizes: list[tuple[int, int]], kept: int
) -> Iterator[RejectedAnswer]:
    place = start

    def take(kind: str, *shape: int) -> Any:  # noqa: ANN401 - arrays of two types
        nonlocal place
        count = int(np.prod(shape))
        found = np.frombuffer(content, kind, count, place).reshape(shape)
        place += found.nbytes
        return found

    for n_tokens, n_places in sizes:
        tokens, positions = take("<i4", n_tokens), take("<i4", n_places)
        laws = KeptLaws(take("<i4", n_places, kept), take("<f2", n_places, kept + 1))
        yield RejectedAnswer(tokens, positions, laws)


def _is_sound(answer: RejectedAnswer, n_tokens: int) -> bool:
    laws = answer.laws
    ids_known = all(ids.min() >= 0 and ids.max() < n_tokens for ids in (answer.tokens, laws.ids))
    places = answer.positions
    ordered = (
        bool((np.diff(places) > 0).all()) and places[0] >= 0 and places[-1] < len(answer.tokens)
    )
    sums = np.exp(laws.log_probs.astype(np.float64)).sum(-1)
    return bool(ids_known and ordered and (abs(sums - 1.0) < 0.05).all())


def _facts(path: Path, content: bytes) -> dict[str, Any]:
    if content[: len(_MAGIC)] != _MAGIC:
        raise MalformedFileError(f"{path} holds no rejected drafts; name another file")
    if len(content) < _HEAD.size + _DIGEST:
        raise _malformed(path, f"is cut off after {len(content)} bytes")
    _, version, length = _HEAD.unpack_from(content)
    if version != _VERSION:
        raise _malformed(path, f"has format version {version}, this specrun reads {_VERSION}")
    try:
        return json_object(content[_HEAD.size : _HEAD.size + length])
    except DAMAGE:
        raise _malformed(path, "is damaged") from None


def _malformed(path: Path, problem: str) -> MalformedFileError:
    return MalformedFileError(f"{path} {problem}; delete it to begin anew (specrun learn forget)")


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise MalformedFileError(f"{path} is too large for rejected drafts; name another file")
        return read_regular(path)
    except FileNotFoundError:
        raise FileMissingError(f"there is no file {path}") from None
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read: {error.strerror}") from error
