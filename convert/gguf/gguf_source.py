"""GGUF files as the source of others: metadata with types, tensors one at a time."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.bindings.gguf import GGUFHeader, TensorInfo, read_header, stored_bytes
from specrun.bindings.quantizer import (
    TENSOR_NUMBERS,
    WITH_IMPORTANCE,
    dequantize_rows,
    quantize_rows,
)
from specrun.convert.checkpoint import SourceTensor, read_array, stored_as
from specrun.convert.gguf.writer import (
    FLOATS,
    Metadata,
    PlannedTensor,
    Progress,
    write_gguf,
)
from specrun.convert.names import Named

# == Sources =======================================================================================


class _MetadataReader(GGUFReader):
    """Reads the metadata only: the package refuses tensors of types that it does not support."""

    def _build_tensors(self, start_offs: int, fields: object) -> None:
        self.tensors = []


def require_whole(path: Path, header: GGUFHeader) -> None:
    """Raise UnsupportedModelError if the file is one part of a split model."""
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(f"{path} is one part of a split model: merge the parts first")


class GGUFSource(Named):
    """A checked GGUF file. Raises FileMissingError or MalformedFileError if it cannot be used."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # First the check that cannot hang or run out of memory.
        self.header: GGUFHeader = read_header(self.path)
        self.tensors = {tensor.name: tensor for tensor in self.header.tensors}

    @property
    def shown(self) -> str:
        """The path."""
        return str(self.path)

    def metadata(self) -> Metadata:
        """Return a copy to change and write, without the architecture and empty lists."""
        copied = Metadata()
        try:
            for field in _MetadataReader(self.path).fields.values():
                if field.name.startswith("GGUF.") or field.name == "general.architecture":
                    continue
                kind, value = field.types[0], field.contents()
                is_array = kind is GGUFValueType.ARRAY
                if not is_array or len(value):
                    copied.raw(field.name, value, kind, field.types[-1] if is_array else None)
        except (ValueError, IndexError, KeyError) as error:
            raise self.malformed(f"has metadata that cannot be copied ({error})") from error
        return copied

    def count(self, key: str) -> int:
        """Return a positive whole number of the metadata; raises UnsupportedModelError."""
        value = self.header.metadata.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.unsupported(f"has no single number as {key}")
        return value

    def unchanged(self, tensor: TensorInfo, name: str = "") -> PlannedTensor:
        """Return a tensor of any type to be written bit by bit, under another `name` if given."""
        load = functools.partial(self.stored, tensor)
        return PlannedTensor(name or tensor.name, tensor.shape[::-1], tensor.type_name, load)

    def stored(self, tensor: TensorInfo) -> npt.NDArray[Any]:
        """Return a tensor as the file has it, as `PlannedTensor.load` does."""
        planned = self.unchanged(tensor)
        return read_array(self.path, planned.array_type, planned.array_shape, tensor.offset)

    def as_source(self, tensor: TensorInfo) -> SourceTensor:
        """Return a tensor of any type that `numbers` reads as one of F32 of a checkpoint."""
        shape = tensor.shape[::-1]
        return _Dequantized(self.path, tensor.name, "F32", shape, self, tensor)

    def numbers(self, tensor: TensorInfo) -> npt.NDArray[np.float32]:
        """Return the numbers of a tensor, shape in numpy's order.

        Raises UnsupportedModelError for types that weights are not stored in.
        """
        rows = self.rows(tensor, 0, tensor.n_elements // tensor.shape[0])
        return rows.reshape(tensor.shape[::-1])

    def rows(self, tensor: TensorInfo, first: int, count: int) -> npt.NDArray[np.float32]:
        """Return some rows of a tensor, [count, width]; raises as `numbers`."""
        kind = tensor.type_name
        if kind not in TENSOR_NUMBERS:
            raise self.unsupported(f"stores {tensor.name} as {kind}, which cannot be read")
        width = stored_bytes(tensor.shape[:1], kind)
        place = tensor.offset + first * width
        stored = read_array(self.path, np.uint8, (count, width), place)
        return dequantize_rows(stored, kind, tensor.shape[0])

    def write_changed(
        self,
        output: str | os.PathLike[str],
        metadata: Metadata,
        tensors: Sequence[PlannedTensor],
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Write a file of this architecture that was made of this one, as `write_gguf`."""
        return write_gguf(
            output,
            self.header.architecture,
            metadata,
            tensors,
            force=force,
            progress=progress,
            source=self.path,
        )


@dataclass(frozen=True, slots=True)
class _Dequantized(SourceTensor):
    """A tensor of a GGUF file as numbers, which are worked out where they are read."""

    source: GGUFSource
    tensor: TensorInfo

    def raw(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return a piece, as `SourceTensor.raw`."""
        width = self.shape[-1]
        first, last = start // width, (start + count - 1) // width
        rows = self.source.rows(self.tensor, first, last - first + 1).reshape(-1)
        return rows[start - first * width :][:count]


# == A file with other numbers in its tensors: metadata, names, shapes and types stay ==============


def write_renumbered(
    source: GGUFSource,
    output: str | os.PathLike[str],
    numbers: Mapping[str, npt.NDArray[np.float32]],
    *,
    force: bool = False,
) -> int:
    """Write `source` to `output` with `numbers` (float32, rows first) in its tensors; return bytes.

    Each tensor keeps its type, quantized anew; those that cannot be quantized without an importance
    matrix become Q8_0. Tensors that are not named stay as they are, bit by bit. Raises OptionError
    if `output` exists without `force`, MalformedFileError for numbers that cannot be stored.
    Nothing is left behind on failure.
    """
    planned = [
        _planned(source, tensor, numbers.get(tensor.name)) for tensor in source.header.tensors
    ]
    return source.write_changed(output, source.metadata(), planned, force=force)


def _planned(
    source: GGUFSource, tensor: TensorInfo, numbers: npt.NDArray[np.float32] | None
) -> PlannedTensor:
    if numbers is None:
        return source.unchanged(tensor)
    shape = tensor.shape[::-1]
    if numbers.shape != shape:
        raise MalformedFileError(f"{tensor.name} has the shape {shape}, not {numbers.shape}")
    # Without an importance matrix, the weights are kept in more bits.
    kind = "Q8_0" if tensor.type_name in WITH_IMPORTANCE else tensor.type_name
    load = functools.partial(stored_numbers, numbers, kind, tensor.name)
    return PlannedTensor(tensor.name, shape, kind, load)


def stored_numbers(
    numbers: npt.NDArray[np.float32], kind: str, name: str, n_threads: int = 0
) -> npt.NDArray[Any]:
    """Return float32 numbers as a tensor of this type has them (`PlannedTensor.load`)."""
    if kind in FLOATS:
        return stored_as(numbers, kind, name)
    blocks = quantize_rows(numbers.reshape(-1, numbers.shape[-1]), kind, n_threads=n_threads)
    return blocks.reshape(*numbers.shape[:-1], -1)
