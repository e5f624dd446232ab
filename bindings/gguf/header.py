"""The header of a GGUF file, read and checked before any native code reads the file."""

from __future__ import annotations

import os
import stat
import struct
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import NoReturn

from specrun.bindings.errors import FileMissingError, MalformedFileError
from specrun.bindings.files import without_waiting
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

# == Bounded reading of a file's first bytes, and names for files of another format ================
#
# The file is hostile until proven otherwise. Every length is compared with the size of the file and
# with a fixed limit before anything is read or allocated for it, so time and memory are bounded for
# any file. The file is read, not mapped: a mapped file that shrinks meanwhile would kill the
# process.


# Far above any real model (about 40 MB and 1 M strings), and small enough that a file built to
# reach them costs a second or two.
MAX_HEADER_BYTES = 256 << 20
MAX_STRINGS = 4 << 20

AGAIN = "download it again"
_READ_STEP = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_CONVERT = "convert it with `specrun convert`"
_LEGACY = ("an old ggml file from before GGUF", "get the model as GGUF")
_ARCHIVE = ("a compressed archive", "unpack it first")

# Files that are passed by mistake: their beginning, their kind, the advice.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file it names", "run `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive, as PyTorch checkpoints are", _CONVERT),
    (b"\x80\x02", "a Python pickle, as old PyTorch checkpoints are", _CONVERT),
    *((start, "a Python pickle", _CONVERT) for start in (b"\x80\x03", b"\x80\x04", b"\x80\x05")),
    *((start, *_LEGACY) for start in (b"lmgg", b"fmgg", b"tjgg")),
    *((start, *_ARCHIVE) for start in (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00")),
    (b"7z\xbc\xaf\x27\x1c", *_ARCHIVE),
    (b"\x00\x00\x00\x00", "a download that never wrote its beginning", AGAIN),
)
_MARKUP = (b"<!doctype", b"<html", b"<head", b"<?xml")


class _HeaderReader:
    """The beginning of the file, read as far as needed and never beyond the limits."""

    def __init__(self, file: FileIO, size: int, shown: str) -> None:
        self.size = size
        self.position = 0
        self.strings_left = MAX_STRINGS
        self._file = file
        self._shown = shown
        self._data = bytearray()

    def fail(self, problem: str, advice: str = AGAIN) -> NoReturn:
        """Refuse the file in one sentence that begins with its path."""
        raise MalformedFileError(f"{self._shown} {problem}; {advice}")

    def damaged(self, problem: str) -> NoReturn:
        """Refuse the file because it contradicts itself."""
        self.fail(f"is damaged: {problem}")

    def require(self, end: int, what: str) -> int:
        """Have the bytes up to `end` in memory, to read `what`; return how many are there."""
        if end > self.size:
            needed, left = end - self.position, self.size - self.position
            problem = f"{what} needs {needed:,} bytes, and {left:,} are left"
            self.fail(f"is truncated or damaged: {problem}")
        if end > MAX_HEADER_BYTES:
            self.damaged(f"its header is larger than {MAX_HEADER_BYTES:,} bytes at {what}")
        while len(self._data) < end:
            chunk = self._file.read(_READ_STEP)
            if not chunk:
                self.damaged(f"it shrank to {len(self._data):,} bytes while it was being read")
            self._data += chunk
        return len(self._data)

    def head(self, count: int) -> bytes:
        """Return the first bytes of the file without moving on."""
        count = min(count, self.size)
        self.require(count, "its first bytes")
        return bytes(self._data[:count])

    def begins_file_at(self, end: int, alignment: int) -> bool:
        """Return whether another GGUF file begins at `end`, or where padding would end there."""
        found = []
        for place in (end, -(-end // alignment) * alignment):
            self._file.seek(place)  # all of the header was read
            found.append(self._file.read(4))
        return b"GGUF" in found

    def unpack(self, layout: struct.Struct, what: str) -> int | float:
        """Return one number and move behind it."""
        end = self.position + layout.size
        if end > len(self._data):
            self.require(end, what)
        value: int | float = layout.unpack_from(self._data, self.position)[0]
        self.position = end
        return value

    def u32(self, what: str) -> int:
        """Return an unsigned 32-bit number and move behind it."""
        return int(self.unpack(_U32, what))

    def u64(self, what: str) -> int:
        """Return an unsigned 64-bit number and move behind it."""
        return int(self.unpack(_U64, what))

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes and move behind them."""
        end = self.position + count
        self.require(end, what)
        with memoryview(self._data) as view:
            taken = bytes(view[self.position : end])
        self.position = end
        return taken

    def string(self, what: str) -> bytes:
        """Return the bytes of a string and move behind it."""
        return self.take(self.u64(f"the length of {what}"), what)

    def identifier(self, longest: int, what: str) -> str:
        """Return a key or name of at most `longest` bytes: UTF-8 without zero bytes."""
        length = self.u64(f"the length of {what}")
        if length > longest:
            self.damaged(f"{what} has {length:,} bytes, more than {longest:,}")
        raw = self.take(length, what)
        # llama.cpp cuts names at a zero byte, so two different names would become one.
        if b"\0" in raw:
            self.damaged(f"{what} contains a zero byte")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.damaged(f"{what} is not UTF-8")

    def string_array(self, count: int, what: str) -> ArrayValue:
        """Walk over `count` strings, keeping their bytes and ends, and move behind them."""
        self.strings_left -= count
        if self.strings_left < 0:
            self.damaged(f"{what} brings the file above {MAX_STRINGS:,} strings")
        ends = array("q")
        data, unpack_from = self._data, _U64.unpack_from
        start = position = self.position
        there = len(data)
        for _ in range(count):  # the hot loop: up to a million strings in large vocabularies
            if position + 8 > there:
                there = self.require(position + 8, what)
            position += 8 + unpack_from(data, position)[0]
            if position > there:
                there = self.require(position, what)
            ends.append(position - start)
        return ArrayValue("string", self.take(position - start, what), ends)


def _check_magic(reader: _HeaderReader) -> None:
    """Refuse a file that does not begin as GGUF files do, naming its probable kind."""
    head = reader.head(64)
    if head.startswith(b"GGUF"):
        return
    if not head:
        reader.fail("is empty")
    if b"GGUF".startswith(head):
        reader.fail(f"is cut off after {len(head)} bytes")
    seems, advice = _resemblance(head, reader.size)
    reader.fail(f"is not a GGUF file: {seems}", advice)


def _resemblance(head: bytes, size: int) -> tuple[str, str]:
    for signature, kind, advice in _SIGNATURES:
        if head.startswith(signature):
            return f"it seems to be {kind}", advice
    if head.startswith(b"FUGG"):
        return "it seems to be a big-endian GGUF file", "get the little-endian file"
    # A safetensors file is a length and a JSON object of that length.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "it seems to be a safetensors file", _CONVERT
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(_MARKUP):
        return "it seems to be a web page or a server's error message", "download the file itself"
    if text.startswith(b"{"):
        return "it seems to be JSON text", "name the .gguf file"
    begins = f"it starts with the bytes {head[:4].hex(' ')} instead of 'GGUF'"
    return begins, f"check the path or {AGAIN}"


# == The header ====================================================================================
#
# Checked are the kind of file, its version, every count, length, type, name, shape and offset, and
# that all tensor data is present and does not overlap.


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
"""The metadata key with the number of the file's parameters that are padding."""


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
    """The whole header of a GGUF file, checked; of a split model, this one file's share."""

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
        """The bits of a number on average; 0 if the file holds none."""
        return 8 * sum(tensor.n_bytes for tensor in self.tensors) / max(1, self.n_parameters)

    @property
    def file_type_name(self) -> str | None:
        """The quantization it was made with, such as "Q4_K_M"; None if the file has no type."""
        value = self.metadata.get("general.file_type")
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return FILE_TYPE_NAMES.get(value & ~_GUESSED_FILE_TYPE, f"unknown ({value})")

    @property
    def tensor_type_counts(self) -> Mapping[str, int]:
        """How many tensors have each type, the most frequent first."""
        return dict(Counter(tensor.type_name for tensor in self.tensors).most_common())


def read_header(path: str | os.PathLike[str], *, named: bool = True) -> GGUFHeader:
    """Read and check the header of the GGUF model at `path`.

    Without `named` it need not name an architecture (an importance matrix, a model's other files):
    `architecture` of the result then raises KeyError. Raises FileMissingError if there is no such
    file or it cannot be read, MalformedFileError otherwise.
    """
    shown = os.fsdecode(path)
    # A path may hold line breaks or control codes, which must not reach the terminal.
    shown = shown if shown.isprintable() else repr(shown)
    try:
        with _open(path, shown) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FileMissingError(f"{shown} is not a regular file; name a GGUF file")
            return _read(_HeaderReader(file, status.st_size, shown), named=named)
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


def _read(reader: _HeaderReader, *, named: bool) -> GGUFHeader:
    version, n_tensors, n_keys = _read_preamble(reader)
    metadata = _read_metadata(reader, n_keys)
    if named:
        _check_architecture(reader, metadata)
    alignment = _read_alignment(reader, metadata)
    tensors = _read_tensors(reader, n_tensors, alignment)
    _check_extents(reader, tensors, alignment)
    values = {key: value for key, (_, value) in metadata.items()}
    return GGUFHeader(version, reader.size, alignment, MappingProxyType(values), tensors)


def _read_preamble(reader: _HeaderReader) -> tuple[int, int, int]:
    _check_magic(reader)
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


def _check_count(reader: _HeaderReader, count: int, most: int, least_bytes: int, kind: str) -> None:
    left = reader.size - reader.position
    claim = f"it announces {count:,} {kind}"
    if count * least_bytes > left:
        reader.fail(f"is truncated or damaged: {claim} with {left:,} bytes left")
    if count > most:
        reader.damaged(f"{claim}, more than the {most:,} that any model could need")


def _read_metadata(reader: _HeaderReader, n_keys: int) -> _Metadata:
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


def _read_value(reader: _HeaderReader, code: int, what: str) -> MetadataValue:
    if code == STRING_CODE:
        return reader.string(what).decode("utf-8", "replace")
    if code == ARRAY_CODE:
        return _read_array(reader, what)
    kind = SCALAR_TYPES.get(code)
    if kind is None:
        reader.damaged(f"{what} has the unknown type {code:,}")
    value = reader.unpack(kind.layout, what)
    return value != 0 if kind.name == "bool" else value


def _read_array(reader: _HeaderReader, what: str) -> ArrayValue:
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


def _check_architecture(reader: _HeaderReader, metadata: _Metadata) -> None:
    _, name = metadata.get("general.architecture", (None, None))
    _, kind = metadata.get("general.type", (None, None))
    if name is None and kind == "imatrix":
        problem = "is an importance matrix, which quantize and convert take as --imatrix"
        reader.fail(problem, "give a model")
    if name is None:
        problem = "does not name its architecture (general.architecture)"
        reader.fail(problem, "convert the model again")
    if not isinstance(name, str):
        reader.damaged(f"general.architecture is {name!r} instead of a name")
    if not name or len(name) > 64 or not name.isprintable():
        reader.damaged(f"general.architecture is {_quoted(name)}, which cannot be a name")


def _read_alignment(reader: _HeaderReader, metadata: _Metadata) -> int:
    code, value = metadata.get("general.alignment", (UINT32_CODE, _DEFAULT_ALIGNMENT))
    if code != UINT32_CODE or not isinstance(value, int):
        reader.damaged(f"general.alignment is {_quoted(str(value))}, which is not of type uint32")
    if not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        wanted = f"a power of two up to {_MAX_ALIGNMENT:,}"
        reader.damaged(f"general.alignment is {value:,}, not {wanted}")
    return value


def _read_tensors(reader: _HeaderReader, n_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
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


def _read_tensor(reader: _HeaderReader, what: str) -> TensorInfo:
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


def _check_extents(reader: _HeaderReader, tensors: tuple[TensorInfo, ...], alignment: int) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for first, second in pairwise(ordered):
        if first.offset + first.n_bytes > second.offset:
            reader.damaged(f"the tensors {_quoted(first.name)} and {_quoted(second.name)} overlap")
    end = ordered[-1].offset + ordered[-1].n_bytes if ordered else 0
    if 0 < end < reader.size and reader.begins_file_at(end, alignment):
        problem = "holds another GGUF file behind its tensors, as if parts were joined with cat"
        reader.fail(problem, "join the parts with llama.cpp's llama-gguf-split --merge")
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
