r"""The file of a datastore: a header, then tokens, order and sampled keys, mapped when opened.

       0  magic "specrun datastore\n", version (uint32), length of the JSON (uint32), the JSON
    4096  tokens int32 [n_tokens], order uint32 [n_positions], samples int64 [n_samples],
          each at a multiple of 64

All numbers are little-endian. Sizes are checked against the header before anything is mapped.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specrun.bindings.errors import FileMissingError, MalformedFileError, PairError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.bindings.regular_file import open_regular
from specrun.runtime.drafters.retrieval.datastore.context_index import (
    DEPTH,
    SAMPLE_EVERY,
    ContextIndex,
)

HEADER_BYTES = 4096
_MAGIC = b"specrun datastore\n"
_VERSION = 1
_ALIGNMENT = 64
_PREFIX = struct.Struct(f"<{len(_MAGIC)}sII")
_LARGEST = 2**32
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """The header: `n_tokens` with separators, `n_positions` ordered ones, and where they come from.

    `vocabulary` is the `Vocabulary.fingerprint`, in hex, that the tokens belong to, `n_words` its
    size (the name is the file's), `model` the file it was read from, `crc32` that of everything
    behind the header.
    """

    n_tokens: int
    n_positions: int
    n_words: int
    vocabulary: str
    model: str
    n_files: int
    n_text_bytes: int
    crc32: int = 0

    @property
    def n_samples(self) -> int:
        """How many keys are sampled."""
        return -(-self.n_positions // SAMPLE_EVERY)

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Where tokens, order and samples begin, and where the file ends."""
        order = _aligned(HEADER_BYTES + 4 * self.n_tokens)
        samples = _aligned(order + 4 * self.n_positions)
        return HEADER_BYTES, order, samples, samples + 8 * self.n_samples


def write_store_header(file: BinaryIO, header: StoreHeader) -> None:
    """Write the header at the beginning of a file."""
    text = json.dumps(dataclasses.asdict(header)).encode()
    file.seek(0)
    file.write((_PREFIX.pack(_MAGIC, _VERSION, len(text)) + text).ljust(HEADER_BYTES, b"\0"))


def read_store_header(path: Path) -> StoreHeader:
    """Return a datastore's header, checked; raises MalformedFileError."""
    try:
        with open_regular(path) as file:
            head = file.read(HEADER_BYTES)
            size = file.seek(0, 2)
    except OSError as error:
        raise FileMissingError(f"the datastore {path} cannot be read: {error.strerror}") from error
    if len(head) < _PREFIX.size or not head.startswith(_MAGIC):
        advice = "make one with `specrun datastore build`"
        raise MalformedFileError(f"{path} is not a datastore: {advice}")
    _, version, length = _PREFIX.unpack_from(head)
    if version != _VERSION:
        raise MalformedFileError(
            f"{path} is a datastore of version {version}; this specrun reads version {_VERSION}: "
            "build it again"
        )
    header = _parsed(head[_PREFIX.size : _PREFIX.size + length], path)
    # Before mapping: reading behind the end of a mapped file kills the process (SIGBUS).
    if size != header.offsets[-1]:
        raise MalformedFileError(
            f"the datastore {path} has {size:,} bytes where its header says "
            f"{header.offsets[-1]:,}: it is truncated or damaged; build it again"
        )
    return header


def open_store(path: Path, vocabulary: Vocabulary) -> ContextIndex:
    """Return the mapped index of a datastore; raises `PairError` for one of another vocabulary."""
    header, fingerprint = read_store_header(path), vocabulary.fingerprint.hex()
    if header.vocabulary != fingerprint:
        raise PairError(
            f"the datastore {path} was made for another vocabulary ({header.n_words:,} tokens, "
            f"hash {header.vocabulary[:12]}, of {header.model}) than the target's "
            f"({vocabulary.size:,} tokens, hash {fingerprint[:12]}): build it again with -m and "
            "this target"
        )
    return open_mapped(path)


def open_mapped(path: Path) -> ContextIndex:
    """Return the mapped index of a datastore, whatever its vocabulary."""
    header = read_store_header(path)
    tokens, order, samples, _ = header.offsets
    return ContextIndex(
        np.memmap(path, np.dtype("<i4"), "r", tokens, (header.n_tokens,)),
        np.memmap(path, np.dtype("<u4"), "r", order, (header.n_positions,)),
        np.memmap(path, np.dtype("<i8"), "r", samples, (header.n_samples,)),
        header.n_words,
    )


def verify_store(path: Path) -> bool:
    """Return whether a datastore's content still has its header's checksum; reads all of it."""
    return content_checksum(path) == read_store_header(path).crc32


def content_checksum(path: Path) -> int:
    """Return the CRC-32 of everything behind the header."""
    crc = 0
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while data := file.read(_CHUNK):
            crc = zlib.crc32(data, crc)
    return crc


def _parsed(text: bytes, path: Path) -> StoreHeader:
    def malformed(problem: str) -> MalformedFileError:
        return MalformedFileError(f"the datastore {path} {problem}: build it again")

    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise malformed("has a damaged header") from error
    fields = dataclasses.fields(StoreHeader)
    if not isinstance(values, dict) or set(values) != {entry.name for entry in fields}:
        raise malformed("has a header without its fields")
    for entry in fields:
        value = values[entry.name]
        # bool is an int to isinstance, so types are compared.
        whole = type(value) is int and 0 <= value < _LARGEST**2
        if not (isinstance(value, str) if entry.type == "str" else whole):
            raise malformed(f"says {entry.name} is {str(value)[:40]!r}")
    header = StoreHeader(**values)
    # DEPTH separators begin the tokens and one ends them; no position belongs to any of these.
    possible = 0 < header.n_positions <= header.n_tokens - DEPTH - 1 < _LARGEST
    if not possible or not 0 < header.n_words < 2**31 - 1:
        raise malformed(
            f"claims {header.n_positions:,} positions in {header.n_tokens:,} tokens of a "
            f"vocabulary of {header.n_words:,}, which cannot be"
        )
    return header


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
