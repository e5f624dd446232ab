"""Writes GGUF files: the header first, then one tensor at a time, the whole file or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType, GGUFWriter

from specrun.bindings.errors import SpecrunError
from specrun.bindings.gguf_types import TENSOR_TYPES
from specrun.convert.metadata import Metadata
from specrun.runtime.atomic import check_target, require_free_space
from specrun.runtime.unnamed_file import unnamed_path

__all__ = ["STORED_TYPES", "PlannedTensor", "Progress", "write_gguf"]

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes in all."""

STORED_TYPES: dict[str, npt.DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I32": np.int32,
    "I64": np.int64,
}
"""The tensor types that are arrays of numbers, with the numpy type that holds them; BF16 as its 16 bits."""

_CODES = {kind.name: code for code, kind in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written: `shape` in numpy's order (rows first), `type_name` any of ggml's.

    `load` is called once, when its turn comes, and returns the array of `shape` in the numpy type of STORED_TYPES,
    or for all other types the blocks as the file holds them: uint8 numbers, [n_bytes].
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    load: Callable[[], npt.NDArray[Any]]

    @property
    def n_bytes(self) -> int:
        """The size in the file, without padding."""
        kind = TENSOR_TYPES[_CODES[self.type_name]]
        return prod(self.shape) // kind.block_size * kind.block_bytes

    def read(self) -> npt.NDArray[Any]:
        """Load the array; raises SpecrunError if it is not what was planned."""
        array = np.ascontiguousarray(self.load())
        kind = np.dtype(STORED_TYPES.get(self.type_name, np.uint8))
        shape = self.shape if self.type_name in STORED_TYPES else (self.n_bytes,)
        if array.shape != shape or array.dtype != kind:
            got = f"{array.shape} of {array.dtype}, not {shape} of {kind}"
            raise SpecrunError(f"the tensor {self.name} came out as {got}: this is a mistake in specrun")
        return array


def write_gguf(
    output: str | os.PathLike[str],
    architecture: str,
    metadata: Metadata,
    tensors: Sequence[PlannedTensor],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a GGUF file and return its size in bytes; only one tensor is in memory at a time.

    Raises OptionError if `output` exists and `force` is not given, SpecrunError if the disk is full; what
    `PlannedTensor.load` raises passes through. Nothing is left behind on failure.
    """
    target = Path(output)
    check_target(target, force=force)
    total = sum(tensor.n_bytes for tensor in tensors)
    require_free_space(target.parent, total)
    with unnamed_path(target, force=force) as aside:
        writer = GGUFWriter(aside, architecture)
        try:
            _write_header(writer, metadata, tensors)
            _write_tensors(writer, tensors, total, progress)
        finally:
            writer.close()
        return aside.stat().st_size


def _write_header(writer: GGUFWriter, metadata: Metadata, tensors: Sequence[PlannedTensor]) -> None:
    for key, value, kind, element in metadata:
        writer.add_key_value(key, value, kind, element)
        if key == "general.alignment" and kind is GGUFValueType.UINT32:
            writer.data_alignment = value
    for tensor in tensors:
        # The type's number, not gguf's name of it: llama.cpp has types that the package does not know. With one
        # given, any numpy type but uint8 lets the shape stay in numbers.
        code = _CODES[tensor.type_name]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, code)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write_tensors(writer: GGUFWriter, tensors: Sequence[PlannedTensor], total: int, progress: Progress | None) -> None:
    done = 0
    for tensor in tensors:
        writer.write_tensor_data(tensor.read())
        done += tensor.n_bytes
        if progress is not None:
            progress(done, total)
