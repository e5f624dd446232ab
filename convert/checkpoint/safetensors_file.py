"""Safetensors files: the header is checked, numbers are read one tensor or piece at a time.

The format: a length of 8 bytes (little-endian), a JSON object of that length with type, shape and
extent of each tensor, and the data. Read here because numpy has no bfloat16, which the safetensors
package needs. Nothing is mapped: a mapped file that shrinks ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import FileMissingError, MalformedFileError, UnsupportedModelError
from specrun.bindings.files import open_regular
from specrun.convert.checkpoint.json_file import (
    JsonObject,
    named_errors,
    parse_json_object,
    unique_keys,
)
from specrun.convert.checkpoint.source_tensor import NUMBER_TYPES, SourceTensor

_LARGEST_HEADER = 100_000_000  # the format's own limit
_AGAIN = "download it again"


def read_array(
    path: Path, kind: npt.DTypeLike, shape: tuple[int, ...], offset: int
) -> npt.NDArray[Any]:
    """Return the array of `shape` whose numbers begin `offset` bytes into the file.

    Raises MalformedFileError if the file ends before, FileMissingError if it cannot be read.
    """
    try:
        array: npt.NDArray[Any] = np.fromfile(path, kind, count=prod(shape), offset=offset)
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read any more ({error.strerror})") from error
    if array.size != prod(shape):
        raise MalformedFileError(f"{path} became shorter while it was read")
    return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class StoredTensor(SourceTensor):
    """A tensor in a safetensors file; `offset` counts from the start of the file, in bytes."""

    offset: int

    def raw(self, start: int, count: int) -> npt.NDArray[Any]:
        """Read a piece from the file, as `SourceTensor.raw` says."""
        kind = np.dtype(NUMBER_TYPES[self.type_name])
        return read_array(self.path, kind, (count,), self.offset + start * kind.itemsize)


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header of a safetensors file and return its tensors by name.

    Raises FileMissingError if it cannot be read, MalformedFileError if it is truncated or
    contradicts itself, UnsupportedModelError if it has numbers of an unknown type.
    """
    with named_errors(path), open_regular(path) as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise MalformedFileError(f"{path} is truncated, or not a safetensors file; {_AGAIN}")
        header = parse_json_object(file.read(length), f"the header of {path}", unique_keys)
    names = [name for name in header.values if name != "__metadata__"]
    tensors = {name: _stored(path, header, name, 8 + length, size) for name in names}
    _require_whole(path, tensors.values(), 8 + length, size)
    return tensors


def _require_whole(path: Path, tensors: Iterable[StoredTensor], start: int, size: int) -> None:
    """Raise MalformedFileError unless each byte of the data, from `start` on, is one tensor's.

    The format demands that; a header that breaks it gives a tensor the numbers of another, or none
    of its own.
    """
    end, before = start, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset != end:
            found, wanted = tensor.offset - start, end - start
            what = f"overlaps {before}" if found < wanted else "follows a gap"
            where = (
                f"it begins at byte {found:,} of the data, and what is before ends at {wanted:,}"
            )
            raise MalformedFileError(f"{path} is damaged: {tensor.name} {what}: {where}; {_AGAIN}")
        end, before = end + tensor.n_bytes, tensor.name
    if end != size:
        what = f"no tensor has bytes {end - start:,} to {size - start:,} of its data"
        raise MalformedFileError(f"{path} is damaged: {what}; {_AGAIN}")


def _stored(path: Path, header: JsonObject, name: str, start: int, size: int) -> StoredTensor:
    entry = header.object(name)
    type_name = entry.text("dtype")
    shape, extent = entry.items("shape"), entry.items("data_offsets")
    if type_name not in NUMBER_TYPES:
        raise UnsupportedModelError(f"{path} stores {name} as {type_name}, not {[*NUMBER_TYPES]}")
    if not all(type(n) is int and 0 <= n < 2**48 for n in (*shape, *extent)) or len(extent) != 2:
        raise MalformedFileError(f"{path} is damaged: the place of {name} makes no sense; {_AGAIN}")
    begin, end = extent
    n_bytes = prod(shape) * np.dtype(NUMBER_TYPES[type_name]).itemsize
    if end - begin != n_bytes or n_bytes == 0:
        takes = f"takes {end - begin:,} bytes instead of {n_bytes:,}"
        raise MalformedFileError(f"{path} is damaged: {name} of shape {shape} {takes}; {_AGAIN}")
    over = start + end - size
    if over > 0:
        raise MalformedFileError(f"{path} is truncated: {name} ends {over} bytes behind; {_AGAIN}")
    return StoredTensor(path, name, type_name, tuple(shape), start + begin)
