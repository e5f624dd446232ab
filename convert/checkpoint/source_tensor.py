"""Tensors of a checkpoint: numbers left in their file until they are read, and their types."""

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

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.bindings.quantizer import half_from_bfloat16

# == Number types of weights: conversions that refuse any loss =====================================
#
# Bfloat16, which numpy lacks, is the upper 16 bits of a float32, kept here as uint16.


Bits = npt.NDArray[np.uint16]

# The largest number that does not become infinite when it is rounded to the type.
_LARGEST = {"F16": 65504.0, "BF16": 3.3895e38, "F32": float(np.finfo(np.float32).max)}
_MAGNITUDE = np.uint16(0x7FFF)
_BLOCK = 1 << 16  # numbers at a time, so that intermediate arrays stay in the cache


def widened(bits: Bits) -> npt.NDArray[np.float32]:
    """Return the numbers as float32, which holds every bfloat16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bfloat16_bits(array: npt.NDArray[np.float32]) -> Bits:
    """Return float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    # Adding just under half of the last kept bit, plus that bit, rounds ties to even.
    last = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + last) >> np.uint32(16)).astype(np.uint16)


def stored_as(array: npt.NDArray[Any], type_name: str, shown: str) -> npt.NDArray[Any]:
    """Return numbers as F32, F16 or BF16 (as uint16), rounded to nearest; whole numbers as I64.

    Raises MalformedFileError if a number is not finite, UnsupportedModelError if one is too large
    for the type; `shown` names the tensor.
    """
    wanted = np.signedinteger if type_name == "I64" else np.floating
    if not np.issubdtype(array.dtype, wanted):
        needed = "whole" if type_name == "I64" else "floating-point"
        raise UnsupportedModelError(f"{shown} holds {array.dtype} numbers: they must be {needed}")
    if type_name == "I64":
        return array.astype(np.int64, copy=False)
    largest = max(float(np.max(array)), -float(np.min(array))) if array.size else 0.0
    _check_largest(largest, type_name, shown)
    if type_name == "F16":
        return array.astype(np.float16, copy=False)
    wide = array.astype(np.float32, copy=False)
    return wide if type_name == "F32" else bfloat16_bits(wide)


def raw_stored_as(
    raw: npt.NDArray[Any], source_type: str, type_name: str, shown: str
) -> npt.NDArray[Any]:
    """Return the numbers of a checkpoint, in the numpy type of `source_type`, as `stored_as` would.

    Bfloat16 comes as its 16 bits, widened only if it must be. Raises as `stored_as` does.
    """
    if source_type != "BF16" or type_name == "F32":
        return stored_as(widened(raw) if source_type == "BF16" else raw, type_name, shown)
    # Magnitudes are ordered as their bits are, and numbers that are not finite come last.
    largest = float(widened(np.array([_largest_magnitude(raw)], np.uint16))[0])
    _check_largest(largest, "F32" if type_name == "BF16" else type_name, shown)
    return raw if type_name == "BF16" else half_from_bfloat16(raw)


def _largest_magnitude(bits: npt.NDArray[np.uint16]) -> int:
    """Return the largest of the bits without their sign, 0 of none."""
    magnitudes = np.empty(min(_BLOCK, bits.size), np.uint16)
    largest = 0
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        np.bitwise_and(block, _MAGNITUDE, out=magnitudes[: block.size])
        largest = max(largest, int(magnitudes[: block.size].max()))
    return largest


def _check_largest(largest: float, type_name: str, shown: str) -> None:
    if not np.isfinite(largest):
        raise MalformedFileError(f"{shown} holds numbers that are not finite: it is damaged")
    if largest > _LARGEST[type_name]:
        raise UnsupportedModelError(
            f"{shown} holds {largest:g}, too large for {type_name.lower()}: convert to bf16 or f32"
        )


# == Tensors, and the digest of a checkpoint =======================================================
#
# The digest is the SHA-256 that a converted file carries. It covers the files that describe the
# checkpoint, and the tensors that were converted, each by name, type, shape and numbers, but not
# their distribution over shards. Numbers are hashed in pieces of `PIECE_BYTES`, several at a time,
# and then the hashes of the pieces.


NUMBER_TYPES: dict[str, npt.DTypeLike] = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"},
    **{"I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"},
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
        """Return the result of `read`, from all of the raw numbers."""
        return (widened(raw) if self.type_name == "BF16" else raw).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class ReplacedRow(SourceTensor):
    """A matrix with the numbers of another in all rows but one, which is `values`, in raw form."""

    inner: SourceTensor
    row: int
    values: npt.NDArray[Any]

    @classmethod
    def of(cls, inner: SourceTensor, row: int, values: npt.NDArray[Any]) -> ReplacedRow:
        """Return a matrix with one row replaced by numbers, in the matrix's own type."""
        kind = "F32" if inner.type_name == "F64" else inner.type_name
        stored = stored_as(values, kind, inner.name)
        raw = stored.astype(NUMBER_TYPES[inner.type_name], copy=False)
        return cls(inner.path, inner.name, inner.type_name, inner.shape, inner, row, raw)

    def raw(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return a piece, as `SourceTensor.raw`."""
        piece = self.inner.raw(start, count)
        width = self.shape[-1]
        first = self.row * width  # of the replaced numbers
        begin, end = max(start, first), min(start + count, first + width)
        if begin < end:
            piece = piece.copy()
            piece[begin - start : end - start] = self.values[begin - first : end - first]
        return piece


class SourceDigest:
    """Collects the hashes of a checkpoint's files and tensors, in any order."""

    placeholder = "0" * 64
    """A placeholder in the file until all tensors have been read: as long as `value`."""

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
