"""N-gram pools over their life: loaded from a file, learnt into by conversations, saved.

The file is little-endian, versioned, bound to a vocabulary, and written whole or not at all:

    magic "SPECNGRM" | version u32 | n u32 | n-grams u64 | tokens u64
    vocabulary size u32 | vocabulary SHA-256 | lengths u8[n-grams] | tokens i32[tokens]
    SHA-256 of all before

N-grams stand in the order of their use, so that a pool with smaller bounds keeps the latest.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from specrun.bindings.atomic import atomic_path, check_target
from specrun.bindings.errors import FileMissingError, MalformedFileError, ModelError, OptionError
from specrun.bindings.regular_file import read_regular
from specrun.runtime.drafters.lookahead.ngram_pool import MAX_NGRAM, NgramPool

_MAGIC = b"SPECNGRM"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQI32s")
_DIGEST = 32
_MAX_FILE = 1 << 30


class SizedVocabulary(Protocol):
    """What tells a vocabulary from another: the number of its tokens and the SHA-256 of all."""

    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def fingerprint(self) -> bytes: ...  # noqa: D102


def save_pool(pool: NgramPool, path: str | os.PathLike[str], vocabulary: SizedVocabulary) -> None:
    """Write a pool over `path`; after a crash at any moment the old file or the new one is there.

    Raises OptionError if the file cannot be written, SpecrunError if the disk is full.
    """
    ngrams = list(pool)
    lengths = np.fromiter(map(len, ngrams), np.uint8, len(ngrams))
    tokens = np.fromiter(chain.from_iterable(ngrams), "<i4", int(lengths.sum(dtype=np.int64)))
    header = _HEADER.pack(
        _MAGIC, _VERSION, pool.n, len(ngrams), len(tokens), vocabulary.size, vocabulary.fingerprint
    )
    content = header + lengths.tobytes() + tokens.tobytes()
    # Written aside and renamed: a crash leaves the old pool or the new one.
    with atomic_path(path, force=True) as aside:
        aside.write_bytes(content + hashlib.sha256(content).digest())


def load_pool(
    path: str | os.PathLike[str],
    vocabulary: SizedVocabulary,
    *,
    n: int | None = None,
    per_key: int = 16,
    max_keys: int = 16384,
) -> NgramPool:
    """Return the pool of a file within these bounds; a smaller `n` than the file's cuts n-grams.

    Raises FileMissingError, MalformedFileError for a file that is no pool, damaged or of another
    version, and ModelError for a pool of another vocabulary.
    """
    place = Path(path)
    content = _read(place)

    def malformed(problem: str) -> MalformedFileError:
        return MalformedFileError(f"{place} {problem}")

    if content[: len(_MAGIC)] != _MAGIC:
        raise malformed("is not a pool of n-grams; name another file to begin a new pool")
    if len(content) < _HEADER.size + _DIGEST:
        raise malformed(f"is cut off after {len(content)} bytes; delete it to begin a new pool")
    _, version, longest, n_ngrams, n_tokens, size, fingerprint = _HEADER.unpack_from(content)
    if version != _VERSION:
        raise malformed(f"has format version {version}, this specrun reads {_VERSION}; delete it")
    # Sizes are checked before anything is read by them: a damaged header may claim any number.
    expected = _HEADER.size + n_ngrams + 4 * n_tokens + _DIGEST
    if len(content) != expected:
        sizes = f"{len(content)} bytes instead of {expected}"
        raise malformed(f"has {sizes}; delete it to begin anew")
    if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
        raise malformed("is damaged (its checksum is wrong); delete it to begin a new pool")
    if (size, fingerprint) != (vocabulary.size, vocabulary.fingerprint):
        raise ModelError(
            f"{place} was made with another vocabulary ({size} tokens, the target has "
            f"{vocabulary.size}); give each target a pool of its own"
        )
    # Lengths are bytes: as int64 their sum cannot overflow.
    lengths = np.frombuffer(content, np.uint8, n_ngrams, _HEADER.size).astype(np.int64)
    tokens = np.frombuffer(content, "<i4", n_tokens, _HEADER.size + n_ngrams)
    if not _is_sound(lengths, tokens, longest, size):
        raise malformed("contradicts itself; delete it to begin a new pool")
    pool = NgramPool(n or longest, per_key=per_key, max_keys=max_keys)
    stored: list[int] = tokens.tolist()
    ends: list[int] = np.cumsum(lengths).tolist()
    sized = zip(ends, lengths.tolist(), strict=True)
    # Added in the order of use, so that a pool with smaller bounds drops the oldest.
    pool.update(stored[end - length : end] for end, length in sized)
    return pool


def _is_sound(lengths: np.ndarray, tokens: np.ndarray, longest: int, size: int) -> bool:
    if not 2 <= longest <= MAX_NGRAM or int(lengths.sum()) != len(tokens):
        return False
    if len(lengths) and (lengths.min() < 2 or lengths.max() > longest):
        return False
    return not len(tokens) or (tokens.min() >= 0 and bool(tokens.max() < size))


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE:
            problem = "is larger than any pool of n-grams; name another file"
            raise MalformedFileError(f"{path} {problem}")
        return read_regular(path)
    except FileNotFoundError:
        raise FileMissingError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise OptionError(f"{path} is a folder; name a file") from None
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read: {error.strerror}") from error


class NgramStore:
    """A pool that can return to how it began, and is saved with all that it ever learned.

    `save` writes a pool somewhere; None keeps nothing. Several conversations may feed one store,
    each adding what its own text says; what is drafted in one of them then depends on the others,
    the text never does.
    """

    def __init__(self, pool: NgramPool, save: Callable[[NgramPool], None] | None = None) -> None:
        self.pool = pool
        self._begun_with = pool.copy()
        self._set_aside: NgramPool | None = None
        self._save = save
        self._is_new = False

    def for_conversation(self) -> NgramStore:
        """Return the store that a new conversation feeds: this one if it is saved, else its own.

        What nobody saves is forgotten with the conversation: its own store begins with what this
        one began with.
        """
        return self if self._save is not None else NgramStore(self._begun_with.copy())

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram."""
        self.pool.add(ngram)
        self._is_new = True

    def replace(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Delete n-grams that begin with `old`, and add `new`."""
        self.pool.replace(old, new)
        self._is_new = True

    def add_text(self, tokens: Sequence[int], start: int, size: int) -> list[tuple[int, ...]]:
        """Add the text's n-grams of `size` tokens that end at `start` or later; return them."""
        ends = range(max(start + 1, size), len(tokens) + 1)
        ngrams = [tuple(tokens[end - size : end]) for end in ends]
        for ngram in ngrams:
            self.add(ngram)
        return ngrams

    def forget(self) -> None:
        """Return to how the pool began, for all that feed it; what was learnt is still saved."""
        if self._save is not None and self._is_new:
            self._set_aside = self._together()
        self.pool = self._begun_with.copy()

    def save(self) -> None:
        """Write what is new, over an earlier file."""
        if self._save is not None and self._is_new:
            self._save(self._together())
            self._is_new = False

    def close(self) -> None:
        """Save; the store stays usable."""
        self.save()

    def _together(self) -> NgramPool:
        if self._set_aside is None:
            return self.pool.copy()
        together = self._set_aside.copy()
        together.update(self.pool)
        return together


def open_store(
    path: Path | None,
    vocabulary: SizedVocabulary,
    *,
    n: int,
    per_key: int,
    max_keys: int,
    keep: bool = True,
) -> NgramStore:
    """Return the store of a file, which need not exist yet; None for one that lives in memory only.

    `keep` False reads the file and never writes it. Raises the errors of `load_pool`, and at once
    those that writing would raise for a missing folder.
    """
    if path is None:
        return NgramStore(NgramPool(n, per_key=per_key, max_keys=max_keys))
    if path.exists() or not keep:
        pool = load_pool(path, vocabulary, n=n, per_key=per_key, max_keys=max_keys)
    else:
        pool = NgramPool(n, per_key=per_key, max_keys=max_keys)
    if not keep:
        return NgramStore(pool)
    check_target(path, force=True)
    return NgramStore(pool, lambda latest: save_pool(latest, path, vocabulary))
