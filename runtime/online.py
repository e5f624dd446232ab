"""Online speculative decoding (Liu et al. 2023): rejected drafts, kept to learn from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    ModelError,
    OptionError,
    SpecrunError,
)
from specrun.bindings.files import (
    DAMAGE,
    atomic_path,
    count_in,
    json_object,
    list_in,
    logger,
    read_regular,
    state_folder,
    text_in,
)
from specrun.bindings.models.model import Model
from specrun.runtime.laws.transform import Logits
from specrun.runtime.planning import describe_file

# == The replay buffer (Liu et al. 2023, section 3.2) ==============================================
#
# The target's row at a rejected draft is the distribution that should have been drafted from. The
# buffer keeps it with the text before it: contexts and distributions, answer by answer, the oldest
# dropped first. Of a row it keeps the distribution at temperature 1, at any temperature of the
# answer: its KEPT_TOKENS most likely tokens with their log-probabilities in float16, and the sum of
# all others. That is 390 bytes a position; a whole row of 32,000 tokens takes 64,000. A
# divergence of the two coarser distributions never exceeds that of the whole ones (data
# processing).
#
# The paper empties its buffer after every update. This one drops only the oldest answers: a drafter
# that learns from few positions again and again unlearns the others.


KEPT_TOKENS = 64
"""How many tokens of a distribution are kept by their ids."""

MOST_BYTES = 16 << 20
"""The most bytes that a buffer holds: about 40,000 positions."""

_LEAST = -30.0  # the logarithm of probability 0: finite, also in float16
_ANSWER_BYTES = 64

TokenArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RejectedAnswer:
    """A text and the `n` positions in it, ascending, after which drafts were rejected.

    `tokens` [T] end with the last of them. Of the distribution of the token after each position
    there are ids [n, K] and log-probabilities [n, K + 1] in float16, whose last column is that of
    all other tokens together.
    """

    tokens: TokenArray
    positions: TokenArray
    ids: TokenArray
    log_probs: npt.NDArray[np.float16]

    @property
    def n_bytes(self) -> int:
        """Its size, in memory and in a file, nearly."""
        arrays = (self.tokens, self.positions, self.ids, self.log_probs)
        return _ANSWER_BYTES + sum(array.nbytes for array in arrays)

    @property
    def digest(self) -> bytes:
        """A hash of its text, which decides whether it is used to learn or to measure."""
        return hashlib.sha256(self.tokens.tobytes()).digest()


def likeliest(logits: Logits, count: int) -> tuple[TokenArray, npt.NDArray[np.float16]]:
    """Return the `count` most likely tokens of a row, ascending by id, and log-probabilities.

    Those are float16 [count + 1], the last one of all other tokens together. Raises OptionError for
    a row without a finite number.
    """
    row = logits.astype(np.float64)
    highest = float(row.max())
    if not np.isfinite(highest):
        raise OptionError(f"a row of logits with the maximum {highest} has no distribution")
    weights = np.exp(row - highest)
    count = min(count, len(row))
    ids = np.sort(np.argpartition(row, len(row) - count)[len(row) - count :])
    rest = weights.sum() - weights[ids].sum()
    kept = np.append(weights[ids], max(rest, 0.0)) / weights.sum()
    logs = np.log(np.maximum(kept, np.exp(_LEAST)))
    return ids.astype(np.int32), logs.astype(np.float16)


class RejectionNotes:
    """Rejected drafts of the answer under way in one conversation, for a buffer of all answers.

    `note` adds one while an answer is made, `end_answer` puts them into the buffer. Nothing is kept
    of an answer whose drafts were all accepted.
    """

    def __init__(self, buffer: RejectionBuffer) -> None:
        self._buffer = buffer
        self._pending: list[tuple[int, TokenArray, npt.NDArray[np.float16]]] = []

    def note(self, position: int, logits: Logits) -> None:
        """Note a draft that was rejected after the token at `position`; copy its distribution."""
        self._pending.append((position, *likeliest(logits, self._buffer.kept_tokens)))

    def end_answer(self, tokens: Sequence[int]) -> None:
        """Put the notes of an answer into the buffer; `tokens` are its prompt and its own."""
        places, self._pending = self._pending, []
        places = [place for place in places if place[0] < len(tokens)]
        if not places:
            return
        positions = np.array([position for position, _, _ in places], np.int32)
        ids, logs = (np.stack([place[part] for place in places]) for part in (1, 2))
        text = np.array(tokens[: int(positions[-1]) + 1], np.int32)
        self._buffer.add(RejectedAnswer(text, positions, ids, logs))


class RejectionBuffer:
    """Answers with rejected drafts, at most `most_bytes` of them; the oldest go first.

    Every conversation that fills it has `RejectionNotes` of its own.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES, kept_tokens: int = KEPT_TOKENS) -> None:
        self.most_bytes, self.kept_tokens = most_bytes, kept_tokens
        self._answers: deque[RejectedAnswer] = deque()
        self.n_bytes = 0
        """The size of its answers."""
        self.n_changes = 0
        """Counts up whenever it changes."""

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[RejectedAnswer]:
        return iter(tuple(self._answers))

    @property
    def n_places(self) -> int:
        """How many rejected drafts it holds."""
        return sum(len(answer.positions) for answer in self._answers)

    def add(self, answer: RejectedAnswer) -> None:
        """Add an answer, and drop the oldest until all fit; one that is too large is not kept."""
        if answer.n_bytes > self.most_bytes:
            return
        self._answers.append(answer)
        self.n_changes += 1
        self.n_bytes += answer.n_bytes
        while self.n_bytes > self.most_bytes:
            self.n_bytes -= self._answers.popleft().n_bytes


# == The file of a replay buffer ===================================================================
#
# The file is little-endian, versioned, bound to one target, and written whole or not at all:
#
#     magic "SPECLEARN" | version u8 | length u32 of the facts | the facts, JSON
#     of each answer: tokens i32 | positions i32 | ids i32 [n, K] | logarithms f16 [n, K + 1]
#     SHA-256 of all before
#
# Only its owner can read it: it holds prompts and answers.


_MAGIC = b"SPECLEARN"
_VERSION = 1
_HEAD = struct.Struct("<9sBI")
_DIGEST = 32
MOST_FILE_BYTES = 1 << 30
"""The most bytes of a file."""
BUFFER_NAME = "buffer.bin"
"""The file of a buffer in its target's folder."""


@dataclass(frozen=True, slots=True)
class BufferKey:
    """The target that a buffer belongs to: `model` is a hash of its file, `vocabulary` of tokens.

    `name` is the file's, for messages.
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


def learn_folder(key: BufferKey) -> Path:
    """Return the folder of a target's buffer and of its learnt drafters."""
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
    kept = answers[0].ids.shape[1] if answers else buffer.kept_tokens
    facts = json.dumps({"target": asdict(key), "kept": kept, "answers": sizes}).encode()
    content = bytearray(_HEAD.pack(_MAGIC, _VERSION, len(facts)) + facts)
    for answer in answers:
        for array in (answer.tokens, answer.positions, answer.ids):
            content += np.ascontiguousarray(array, "<i4").tobytes()
        content += np.ascontiguousarray(answer.log_probs, "<f2").tobytes()
    content += hashlib.sha256(content).digest()
    with atomic_path(path, force=True) as aside:
        aside.chmod(0o600)
        aside.write_bytes(content)


def load_rejections(
    path: Path, key: BufferKey | None = None, *, most_bytes: int = MOST_BYTES
) -> tuple[BufferKey, RejectionBuffer]:
    """Return the buffer in a file, of `most_bytes` at most, and the target it belongs to.

    Raises FileMissingError, MalformedFileError for a file that is no buffer, damaged or of another
    version, and ModelError for one of another target than `key` (None: of any).
    """
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise MalformedFileError(f"{path} is too large for rejected drafts; name another file")
        content = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileMissingError(f"there is no file {path}") from None
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read: {error.strerror}") from error
    if content[: len(_MAGIC)] != _MAGIC:
        raise MalformedFileError(f"{path} holds no rejected drafts; name another file")
    if len(content) < _HEAD.size + _DIGEST:
        raise _malformed(path, f"is cut off after {len(content)} bytes")
    _, version, length = _HEAD.unpack_from(content)
    if version != _VERSION:
        raise _malformed(path, f"has format version {version}, this specrun reads {_VERSION}")
    start = _HEAD.size + length
    try:
        facts = json_object(content[_HEAD.size : start])
    except DAMAGE:
        raise _malformed(path, "is damaged") from None
    if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
        raise _malformed(path, "is damaged (its checksum is wrong)")
    try:
        found = BufferKey(**facts["target"])
        for text in (found.name, found.model, found.vocabulary):
            text_in(text)
        count_in(found.n_tokens, 1)
        kept = count_in(facts["kept"], 1)
        sizes = [(count_in(t, 1), count_in(p, 1)) for t, p in list_in(facts["answers"])]
    except DAMAGE:
        raise _malformed(path, "contradicts itself") from None
    if key is not None and found.model != key.model:
        raise ModelError(
            f"{path} holds rejected drafts for {found.name} (hash {found.model[:12]}), and "
            f"the target is {key.name} (hash {key.model[:12]}): give each target its own"
        )
    a_place = 4 + 4 * kept + 2 * (kept + 1)
    expected = start + sum(4 * n_tokens + n * a_place for n_tokens, n in sizes) + _DIGEST
    if len(content) != expected:
        raise _malformed(path, f"has {len(content)} bytes instead of {expected}")
    buffer = RejectionBuffer(most_bytes=most_bytes, kept_tokens=kept)
    for answer in _answers(content, start, sizes, kept):
        if not _is_sound(answer, found.n_tokens):
            raise _malformed(path, "contradicts itself")
        buffer.add(answer)
    return found, buffer


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
        ids, logs = take("<i4", n_places, kept), take("<f2", n_places, kept + 1)
        yield RejectedAnswer(tokens, positions, ids, logs)


def _is_sound(answer: RejectedAnswer, n_tokens: int) -> bool:
    ids_known = all(ids.min() >= 0 and ids.max() < n_tokens for ids in (answer.tokens, answer.ids))
    places = answer.positions
    within = places[0] >= 0 and places[-1] < len(answer.tokens)
    sums = np.exp(answer.log_probs.astype(np.float64)).sum(-1)
    sound = within and (np.diff(places) > 0).all() and (abs(sums - 1.0) < 0.05).all()
    return bool(ids_known and sound)


def _malformed(path: Path, problem: str) -> MalformedFileError:
    return MalformedFileError(f"{path} {problem}; delete it to begin anew (specrun learn forget)")


# == The buffer of one runtime: in memory, or in a file that is saved when the runtime closes ======


LearnFrom: TypeAlias = "bool | str | os.PathLike[str]"
"""False: nothing is kept; True: in memory, until the runtime is closed; "keep": in the user's state
folder; or the path of a file."""

KEEP = "keep"


class RejectionStore:
    """A buffer with the target that it belongs to, and the file where it is kept, if any."""

    def __init__(self, buffer: RejectionBuffer, key: BufferKey, path: Path | None = None) -> None:
        self.buffer, self.key, self.path = buffer, key, path
        self._saved = buffer.n_changes

    def save(self) -> None:
        """Write it if it has changed and has a file."""
        now = self.buffer.n_changes
        if self.path is not None and now != self._saved:
            save_rejections(self.buffer, self.path, self.key)
            self._saved = now

    close = save  # the buffer stays usable


def open_rejections(learn: LearnFrom, target: Model) -> RejectionStore | None:
    """Return the store that `learn` names, with the kept answers of this target.

    A damaged file in the user's state folder is left out, with a warning in the log. Raises as
    `load_rejections`, and SpecrunError if the folder cannot be made.
    """
    if learn is False:
        return None
    key, buffer = BufferKey.of(target), RejectionBuffer()
    if learn is True:
        return RejectionStore(buffer, key)
    path = learn_folder(key) / BUFFER_NAME if learn == KEEP else Path(learn).expanduser()
    try:
        if path.exists():
            _, buffer = load_rejections(path, key)
    except (MalformedFileError, FileMissingError) as problem:
        if learn != KEEP:
            raise
        what, advice = "the file of rejected drafts was ignored", "and learning begins anew"
        logger.warning("%s: %s; it is now %s, %s", what, problem, put_aside(path), advice)
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SpecrunError(
                f"{path.parent} cannot be made ({error.strerror}); name a file elsewhere"
            ) from error
    return RejectionStore(buffer, key, path)


def put_aside(path: Path) -> Path:
    """Rename a damaged file, so that nothing overwrites it; return its new name."""
    aside = path.with_suffix(".damaged")
    with contextlib.suppress(OSError):
        path.replace(aside)
    return aside
