"""Tensors of a checkpoint, left in their file until they are read, and the digest of a checkpoint.

The digest is the SHA-256 that a converted file carries. It covers the files that say how to read
the checkpoint and the tensors that were converted, each by name, type, shape and numbers, and
nothing of how they are spread over shards. Numbers are hashed in pieces of `PIECE_BYTES`, so that
pieces can be hashed beside each other, and then the hashes of the pieces.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.convert.checkpoint.number_types import widened

NUMBER_TYPES: dict[str, npt.DTypeLike] = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"},
    **{"I64": "<i8", "I32": "<i4", "BOOL": "|b1"},
}
"""The readable number types, with the numpy type that holds them; BF16 as its 16 bits."""

PIECE_BYTES = 4 << 20
SOURCE_KEY = "specrun.source.sha256"
"""The key of the metadata with the digest."""

_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
    *("added_tokens.json", "chat_template.jinja"),
)


@dataclass(frozen=True, slots=True)
class SourceTensor(ABC):
    """A tensor before it is read: `type_name` is one of NUMBER_TYPES, `shape` has rows first."""

    path: Path
    name: str
    type_name: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """How many bytes its numbers take in the checkpoint."""
        return self.n_elements * np.dtype(NUMBER_TYPES[self.type_name]).itemsize

    @abstractmethod
    def raw(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return `count` numbers from number `start` on, flat, in the numpy type of `type_name`.

        May be called from several threads. Raises MalformedFileError if the file has become
        shorter, FileMissingError if it is gone.
        """

    def read(self) -> npt.NDArray[Any]:
        """Return all numbers in their shape; BF16 is widened to float32. Raises as `raw` does."""
        return self.as_numbers(self.raw(0, self.n_elements))

    def as_numbers(self, raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what `read` would, from all of the raw numbers."""
        return (widened(raw) if self.type_name == "BF16" else raw).reshape(self.shape)


class SourceDigest:
    """Collects the hashes of a checkpoint's files and tensors, in any order."""

    placeholder = "0" * 64
    """What stands in the file until all tensors have been read: as long as `value`."""

    def __init__(self, folder: Path) -> None:
        self._lines: dict[str, str] = {}
        for name in _FILES:
            path = folder / name
            if path.is_file():
                with path.open("rb") as file:
                    self._lines[f"file {name}"] = hashlib.file_digest(file, "sha256").hexdigest()

    def add(self, tensor: SourceTensor, pieces: Sequence[bytes]) -> None:
        """Add a tensor by the SHA-256 of each of its pieces in order."""
        shape = "x".join(map(str, tensor.shape))
        found = hashlib.sha256(b"".join(pieces)).hexdigest()
        self._lines[f"tensor {tensor.name}"] = f"{tensor.type_name} {shape} {found}"

    @property
    def value(self) -> str:
        """The hash of everything added, as 64 hexadecimal digits."""
        text = "".join(f"{name} {line}\n" for name, line in sorted(self._lines.items()))
        return hashlib.sha256(text.encode()).hexdigest()
