"""The header of a GGUF file, read and checked before any native code sees the file.

Checked are the kind of file, its version, every count, length, type, name, shape and offset, and
that all tensor data is there and does not overlap. `gguf.reader` bounds the reading itself.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from math import prod
from types import MappingProxyType

from specrun.bindings.errors import FileMissingError
from specrun.bindings.gguf.reader import AGAIN, HeaderReader, check_magic
from specrun.bindings.gguf.types import (
    ARRAY_CODE,
    FILE_TYPE_NAMES,
    REMOVED_TENSOR_TYPES,
    SCALAR_TYPES,
    STRING_CODE,
    TENSOR_TYPES,
    UINT32_CODE,
    ArrayValue,
    MetadataValue,
)
from specrun.bindings.regular_file import without_waiting

# Far above any real model (about 100 keys, 20,000 tensors), and checked in a second or so.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32

_MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
_MAX_NAME_BYTES = 63  # ggml's GGML_MAX_NAME without the terminating zero
_MAX_KEY_BYTES = 65_535  # the GGUF specification's limit
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # length of the name, number of dimensions, type, offset
_Metadata = dict[str, tuple[int, MetadataValue]]  # type code and value of each key
_GUESSED_FILE_TYPE = 1024  # a flag: the quantizer did not state the type, llama.cpp guessed it


PADDED_PARAMETERS = "specrun.padded_parameters"
"""The metadata key that says how many of the file's parameters are padding."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file: `shape` as ggml has it (row length first), `offset` in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    n_bytes: int
    offset: int

    @property
    def n_elements(self) -> int:
        """How many numbers the tensor holds."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """All that a GGUF file says about itself, checked; of a split model, this one file's share."""

    version: int
    file_size: int
    alignment: int
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`."""
        return str(self.metadata["general.architecture"])

    @property
    def n_parameters(self) -> int:
        """How many numbers all tensors of the file hold."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def n_padded(self) -> int:
        """How many of them are padding, there for their cost alone: see `PADDED_PARAMETERS`."""
        padded = self.metadata.get(PADDED_PARAMETERS)
        return padded if isinstance(padded, int) else 0

    @property
    def bits_per_weight(self) -> float:
        """How many bits a number takes on average; 0 where the file holds none."""
        return 8 * sum(tensor.n_bytes for tensor in self.tensors) / max(1, self.n_parameters)

    @property
    def file_type_name(self) -> str | None:
        """The quantization it was made with, such as "Q4_K_M"; None where the file does not say."""
        value = self.metadata.get("general.file_type")
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return FILE_TYPE_NAMES.get(value & ~_GUESSED_FILE_TYPE, f"unknown ({value})")

    @property
    def tensor_type_counts(self) -> Mapping[str, int]:
        """How many tensors have each type, the most frequent first."""
        return dict(Counter(tensor.type_name for tensor in self.tensors).most_common())


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read and check the header of the GGUF model at `path`.

    Raises FileMissingError if there is no such file or it cannot be read, MalformedFileError
    otherwise.
    """
    return _read_checked(path, named=True)


def read_any_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read and check a GGUF header that need not name an architecture (an importance matrix's).

    Raises as `read_header`; `architecture` of the result raises KeyError where the file has none.
    """
    return _read_checked(path, named=False)


def _read_checked(path: str | os.PathLike[str], *, named: bool) -> GGUFHeader:
    shown = os.fsdecode(path)
    # A path may hold line breaks or control codes, which must not reach the terminal.
    shown = shown if shown.isprintable() else repr(shown)
    try:
        with _open(path, shown) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FileMissingError(f"{shown} is not a regular file; name a GGUF file")
            return _read(HeaderReader(file, status.st_size, shown), named=named)
    except FileMissingError:
        raise
    except FileNotFoundError as error:
        raise FileMissingError(f"there is no file {shown}; check the path") from error
    except IsADirectoryError as error:
        raise FileMissingError(f"{shown} is a directory; name the GGUF file in it") from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        problem = f"{shown} cannot be read ({reason}); check its permissions"
        raise FileMissingError(problem) from error


def _open(path: str | os.PathLike[str], shown: str) -> FileIO:
    try:
        return FileIO(os.fspath(path), opener=without_waiting)
    except ValueError as error:  # a zero byte, or a character that file names cannot hold
        raise FileMissingError(f"{shown} cannot be the name of a file; check the path") from error


def _quoted(text: str) -> str:
    # Names come from the file: they must neither flood the terminal nor reach it as control codes.
    return repr(text if len(text) <= 80 else text[:80] + "...")


def _read(reader: HeaderReader, *, named: bool) -> GGUFHeader:
    version, n_tensors, n_keys = _read_preamble(reader)
    metadata = _read_metadata(reader, n_keys)
    if named:
        _check_architecture(reader, metadata)
    alignment = _read_alignment(reader, metadata)
    tensors = _read_tensors(reader, n_tensors, alignment)
    _check_extents(reader, tensors)
    values = {key: value for key, (_, value) in metadata.items()}
    return GGUFHeader(version, reader.size, alignment, MappingProxyType(values), tensors)


def _read_preamble(reader: HeaderReader) -> tuple[int, int, int]:
    check_magic(reader)
    reader.position = 4
    version = reader.u32("its version")
    if version and not version & 0xFFFF:
        problem = "is a big-endian GGUF file, which cannot be read here"
        reader.fail(problem, "get the little-endian file")
    if version == 1:
        problem = "is a GGUF file of version 1, which llama.cpp no longer reads"
        reader.fail(problem, "get a newer conversion")
    if version not in (2, 3):
        reader.fail(f"has the unknown GGUF version {version:,}", "update specrun, or " + AGAIN)
    n_tensors = reader.u64("its number of tensors")
    n_keys = reader.u64("its number of metadata keys")
    _check_count(reader, n_keys, _MAX_KEYS, _MIN_KEY_BYTES, "metadata keys")
    _check_count(reader, n_tensors, _MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors")
    return version, n_tensors, n_keys


def _check_count(reader: HeaderReader, count: int, most: int, least_bytes: int, kind: str) -> None:
    left = reader.size - reader.position
    claim = f"it announces {count:,} {kind}"
    if count * least_bytes > left:
        reader.fail(f"is truncated or damaged: {claim} with {left:,} bytes left")
    if count > most:
        reader.damaged(f"{claim}, more than the {most:,} that any model could need")


def _read_metadata(reader: HeaderReader, n_keys: int) -> _Metadata:
    metadata: _Metadata = {}
    for number in range(1, n_keys + 1):
        place = f"metadata key {number} of {n_keys}"
        key = reader.identifier(_MAX_KEY_BYTES, place)
        if not key:
            reader.damaged(f"{place} has no name")
        what = f"the metadata key {_quoted(key)}"
        if key in metadata:
            reader.damaged(f"{what} is there twice")
        code = reader.u32(f"the type of {what}")
        metadata[key] = code, _read_value(reader, code, f"the value of {what}")
    return metadata


def _read_value(reader: HeaderReader, code: int, what: str) -> MetadataValue:
    if code == STRING_CODE:
        return reader.string(what).decode("utf-8", "replace")
    if code == ARRAY_CODE:
        return _read_array(reader, what)
    kind = SCALAR_TYPES.get(code)
    if kind is None:
        reader.damaged(f"{what} has the unknown type {code:,}")
    value = reader.unpack(kind.layout, what)
    return value != 0 if kind.name == "bool" else value


def _read_array(reader: HeaderReader, what: str) -> ArrayValue:
    code = reader.u32(what)
    count = reader.u64(what)
    left = reader.size - reader.position
    kind = SCALAR_TYPES.get(code)
    if kind is None and code != STRING_CODE:
        element = "arrays" if code == ARRAY_CODE else f"the unknown type {code:,}"
        reader.damaged(f"{what} is an array of {element}, which llama.cpp does not read")
    least = count * (kind.layout.size if kind else 8)
    if least > left:
        name = kind.name if kind else "string"
        problem = f"{what} announces {count:,} elements of type {name} with {left:,} bytes left"
        reader.fail(f"is truncated or damaged: {problem}")
    if kind is None:
        return reader.string_array(count, what)
    return ArrayValue(kind.name, reader.take(least, what))


def _check_architecture(reader: HeaderReader, metadata: _Metadata) -> None:
    _, name = metadata.get("general.architecture", (None, None))
    if name is None:
        problem = "does not name its architecture (general.architecture)"
        reader.fail(problem, "convert the model again")
    if not isinstance(name, str):
        reader.damaged(f"general.architecture is {name!r} instead of a name")
    if not name or len(name) > 64 or not name.isprintable():
        reader.damaged(f"general.architecture is {_quoted(name)}, which cannot be a name")


def _read_alignment(reader: HeaderReader, metadata: _Metadata) -> int:
    code, value = metadata.get("general.alignment", (UINT32_CODE, _DEFAULT_ALIGNMENT))
    if code != UINT32_CODE or not isinstance(value, int):
        reader.damaged(f"general.alignment is {_quoted(str(value))}, which is not of type uint32")
    if not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        wanted = f"a power of two up to {_MAX_ALIGNMENT:,}"
        reader.damaged(f"general.alignment is {value:,}, not {wanted}")
    return value


def _read_tensors(reader: HeaderReader, n_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    for number in range(1, n_tensors + 1):
        tensor = _read_tensor(reader, f"tensor {number} of {n_tensors}")
        if tensor.name in tensors:
            reader.damaged(f"the tensor {_quoted(tensor.name)} is there twice")
        if tensor.offset % alignment:
            place = f"offset {tensor.offset:,}, not a multiple of {alignment:,}"
            reader.damaged(f"the tensor {_quoted(tensor.name)} is at {place}")
        tensors[tensor.name] = tensor
    data_start = -(-reader.position // alignment) * alignment
    return tuple(
        TensorInfo(t.name, t.shape, t.type_name, t.n_bytes, data_start + t.offset)
        for t in tensors.values()
    )


def _read_tensor(reader: HeaderReader, what: str) -> TensorInfo:
    """Return the next tensor, its offset still counted from the start of the data."""
    name = reader.identifier(_MAX_NAME_BYTES, f"the name of {what}")
    what = f"{what} ({_quoted(name)})"
    n_dims = reader.u32(what)
    if n_dims > _MAX_DIMS:
        reader.damaged(f"{what} has {n_dims:,} dimensions, more than {_MAX_DIMS}")
    shape = tuple([reader.u64(what) for _ in range(n_dims)])
    if 0 in shape or prod(shape) >= 1 << 63:
        reader.damaged(f"{what} has the impossible shape {shape}")
    code = reader.u32(what)
    kind = TENSOR_TYPES.get(code)
    if code in REMOVED_TENSOR_TYPES:
        removed = f"the type {REMOVED_TENSOR_TYPES[code]}, which llama.cpp has removed"
        reader.fail(f"has {what} in {removed}", "get a newer conversion")
    if kind is None:
        reader.fail(f"has {what} in the unknown type {code:,}", "update specrun, or " + AGAIN)
    row = shape[0] if shape else 1
    if row % kind.block_size:
        block = f"the {kind.block_size} of a {kind.name} block"
        reader.damaged(f"{what} has rows of {row:,}, not a multiple of {block}")
    n_bytes = prod(shape) // kind.block_size * kind.block_bytes
    return TensorInfo(name, shape, kind.name, n_bytes, reader.u64(what))


def _check_extents(reader: HeaderReader, tensors: tuple[TensorInfo, ...]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for first, second in pairwise(ordered):
        if first.offset + first.n_bytes > second.offset:
            reader.damaged(f"the tensors {_quoted(first.name)} and {_quoted(second.name)} overlap")
    end = ordered[-1].offset + ordered[-1].n_bytes if ordered else 0
    if end > reader.size:
        there, whole = _amount(reader.size), _amount(end)
        missing = f"{end - reader.size:,} bytes are missing"
        reader.fail(f"is truncated: {there} of {whole} are there ({missing})")


def _amount(n_bytes: int) -> str:
    if n_bytes < 1000:
        return f"{n_bytes} bytes"
    amount = float(n_bytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        amount /= 1000
        if amount < 999.95:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1000:,.1f} EB"
