"""Importance matrix files of llama.cpp: GGUF, written and read, and the legacy format, read.

A matrix holds, for every weight matrix of a model, the sum of squares of each of its inputs over a
text, and the number of summed inputs. llama-quantize and llama-imatrix read files that are written
here, and the other way round.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType, GGUFWriter

from specrun.bindings.errors import FileMissingError, MalformedFileError
from specrun.bindings.files import atomic_path, open_regular
from specrun.bindings.gguf import ArrayValue, GGUFHeader, TensorInfo, read_header
from specrun.convert.checkpoint import read_array

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNKS, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
# Ours, which llama.cpp skips: the end of a run that was cut short, and its text.
_NEXT_CHUNK, _TEXT_HASH = "specrun.imatrix.next_chunk", "specrun.imatrix.text_sha256"
_MOST_ENTRIES = 1 << 18
_LONGEST_NAME = 4096


@dataclass(slots=True)
class ImportanceEntry:
    """One weight matrix: `sums` of squares of inputs, float32 [n, width]; `counts`, int64 [n].

    n is the number of experts, or 1; a matrix of several slices that all see every token has one
    count for all of them. If the count is 0 nothing is known.
    """

    sums: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]

    def means(self) -> npt.NDArray[np.float32]:
        """Return the mean squares, flat; 1 if nothing is known, as llama-quantize has it."""
        rows = self.sums.reshape(len(self.counts), -1)
        counts = self.counts.astype(np.float32)[:, None]
        means = rows / np.maximum(counts, np.float32(1))
        return np.where(counts > 0, means, np.float32(1)).reshape(-1)


@dataclass(slots=True)
class ImportanceMatrix:
    """The entries by the names of the weight matrices, and their source.

    `chunk_size` is 0 for a legacy file, whose counts are chunks instead of tokens. `next_chunk` and
    `text_sha256` let a run go on; None and "" for files that were not made by specrun.
    """

    entries: dict[str, ImportanceEntry] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    chunk_count: int = 0
    chunk_size: int = 0
    next_chunk: int | None = None
    text_sha256: str = ""

    def means(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the mean squares of every matrix's inputs: the quantizer's weights of errors."""
        return {name: entry.means() for name, entry in self.entries.items()}


class _Writer(GGUFWriter):
    """llama.cpp's own matrices name no architecture."""

    def add_architecture(self) -> None:
        """Leave it out."""


def write_importance(
    path: str | os.PathLike[str], matrix: ImportanceMatrix, *, force: bool = False
) -> None:
    """Write a matrix in llama.cpp's GGUF format; the file appears whole or not at all.

    Raises OptionError if `path` exists and `force` is not given, SpecrunError if the disk is full.
    """
    with atomic_path(path, force=force) as aside:
        writer = _Writer(aside, "")
        try:
            writer.add_string("general.type", "imatrix")
            # Even an empty list: llama-quantize needs the key. The package leaves empty arrays out.
            names = list(matrix.datasets or ("",))
            writer.add_key_value(_DATASETS, names, GGUFValueType.ARRAY, GGUFValueType.STRING)
            writer.add_uint32(_CHUNKS, matrix.chunk_count)
            writer.add_uint32(_CHUNK_SIZE, matrix.chunk_size)
            if matrix.next_chunk is not None:
                writer.add_uint32(_NEXT_CHUNK, matrix.next_chunk)
                writer.add_string(_TEXT_HASH, matrix.text_sha256)
            for name, entry in sorted(matrix.entries.items()):
                counts = entry.counts.astype(np.float32)
                sums = np.ascontiguousarray(entry.sums.reshape(len(counts), -1))
                writer.add_tensor(name + _SUMS, sums)
                writer.add_tensor(name + _COUNTS, counts.reshape(-1, 1))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def read_importance(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Read a matrix in llama.cpp's GGUF format, or in the legacy one of older releases (.dat).

    Raises FileMissingError, or MalformedFileError if the file is neither, or holds numbers that
    cannot be.
    """
    file = Path(path)
    try:
        with open_regular(file) as opened:
            is_gguf = opened.read(4) == b"GGUF"
    except OSError as error:
        raise FileMissingError(
            f"the importance matrix {file} cannot be read ({error.strerror})"
        ) from error
    matrix = _read_gguf(file) if is_gguf else _read_legacy(file)
    if not matrix.entries:
        raise MalformedFileError(f"{file} is no importance matrix: it has no entries")
    for name, entry in matrix.entries.items():
        if not np.isfinite(entry.sums).all() or (entry.sums < 0).any() or (entry.counts < 0).any():
            raise MalformedFileError(
                f"{file} has sums of squares for {name} that cannot be: it is damaged"
            )
    return matrix


def _read_gguf(path: Path) -> ImportanceMatrix:
    header = read_header(path, named=False)
    kind = header.metadata.get("general.type", "imatrix")
    if kind != "imatrix" or _CHUNKS not in header.metadata:
        raise MalformedFileError(
            f"{path} is a GGUF file, but no importance matrix: make one with specrun imatrix"
        )
    tensors = {tensor.name: tensor for tensor in header.tensors}
    weights = [name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)]
    entries = {name: _read_entry(path, name, tensors) for name in weights}
    datasets = header.metadata.get(_DATASETS)
    names: tuple[str, ...] = ()
    if isinstance(datasets, ArrayValue) and datasets.element_type == "string":
        names = tuple(str(dataset) for dataset in datasets if dataset)
    return ImportanceMatrix(
        entries,
        names,
        _count(path, header, _CHUNKS),
        _count(path, header, _CHUNK_SIZE),
        _count(path, header, _NEXT_CHUNK) if _NEXT_CHUNK in header.metadata else None,
        str(header.metadata.get(_TEXT_HASH, "")),
    )


def _count(path: Path, header: GGUFHeader, key: str) -> int:
    value = header.metadata.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MalformedFileError(f"{path} has no whole number as {key}: it is damaged")
    return value


def _read_entry(path: Path, name: str, tensors: Mapping[str, TensorInfo]) -> ImportanceEntry:
    sums, counts = tensors[name + _SUMS], tensors.get(name + _COUNTS)
    if counts is None:
        raise MalformedFileError(f"{path} has sums for {name} without counts: it is damaged")
    if sums.type_name != "F32" or counts.type_name != "F32" or sums.n_elements % counts.n_elements:
        raise MalformedFileError(
            f"{path} has sums and counts for {name} that do not fit together: it is damaged"
        )
    shape = (counts.n_elements, sums.n_elements // counts.n_elements)
    read: npt.NDArray[Any] = read_array(path, np.float32, (counts.n_elements,), counts.offset)
    if not np.isfinite(read).all():
        raise MalformedFileError(f"{path} has counts for {name} that cannot be: it is damaged")
    return ImportanceEntry(
        read_array(path, np.float32, shape, sums.offset), np.rint(read).astype(np.int64)
    )


def _read_legacy(path: Path) -> ImportanceMatrix:
    """Read int32 n; n times name, int32 chunks, float32 values; then all chunks, and the dataset.

    Names and values have their lengths before them, as int32. Values are mean squares times chunks.
    """
    data = path.read_bytes()
    try:
        (n_entries,) = struct.unpack_from("<i", data)
        if not 0 < n_entries <= _MOST_ENTRIES:
            raise ValueError("its number of entries")
        position = 4
        entries = {}
        for _ in range(n_entries):
            name, entry, position = _read_legacy_entry(data, position)
            entries[name] = entry
        chunks, datasets = _read_legacy_end(data, position)
    except (struct.error, ValueError) as error:
        raise MalformedFileError(
            f"{path} is no importance matrix, neither as GGUF nor in llama.cpp's legacy format "
            f"({error})"
        ) from error
    return ImportanceMatrix(entries, datasets, chunks, 0)


def _read_legacy_entry(data: bytes, position: int) -> tuple[str, ImportanceEntry, int]:
    (length,) = struct.unpack_from("<i", data, position)
    if not 0 < length <= _LONGEST_NAME:
        raise ValueError("the length of a name")
    name = data[position + 4 : position + 4 + length].decode("utf-8")
    position += 4 + length
    chunks, n_values = struct.unpack_from("<ii", data, position)
    if n_values < 1 or chunks < 0 or 4 * n_values > len(data) - position - 8:
        raise ValueError("the length of an entry")
    values = np.frombuffer(data, "<f4", n_values, position + 8).astype(np.float32)
    # A count of 0 means: the values are the means themselves.
    entry = ImportanceEntry(values.reshape(1, -1), np.array([chunks or 1], np.int64))
    return name, entry, position + 8 + 4 * n_values


def _read_legacy_end(data: bytes, position: int) -> tuple[int, tuple[str, ...]]:
    """Return the chunks in all and the name of the text: both may be missing."""
    starts = [start for start in (position, position + 4) if start + 4 <= len(data)]
    numbers = [struct.unpack_from("<i", data, start)[0] for start in starts]
    chunks = max(numbers[0], 0) if numbers else 0
    if len(numbers) < 2 or not 0 < numbers[1] <= len(data) - position - 8:
        return chunks, ()
    name = data[position + 8 : position + 8 + numbers[1]]
    return chunks, (name.decode("utf-8", "replace"),)
