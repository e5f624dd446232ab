"""GGUF files and their metadata, written whole or not at all."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType, GGUFWriter

from specrun.bindings.errors import SpecrunError
from specrun.bindings.files import check_target, require_free_space, unnamed_path
from specrun.bindings.gguf import TENSOR_TYPES, stored_bytes
from specrun.bindings.models import is_known_file, remember_written

# == Metadata: keys with values of stated types, in order ==========================================


Entry = tuple[str, Any, GGUFValueType, GGUFValueType | None]


class Metadata:
    """GGUF keys and values in order. Setting a key again replaces it; empty lists are left out."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        for key, (value, kind, element) in self._entries.items():
            yield key, value, kind, element

    def add(self, entries: Iterable[Entry]) -> None:
        """Set all of `entries`, such as those of other metadata."""
        for entry in entries:
            self.raw(*entry)

    def copy(self) -> Metadata:
        """Return keys and values that can be changed apart from these."""
        copied = Metadata()
        copied.add(self)
        return copied

    def text(self, key: str, value: str) -> None:
        """Set a string."""
        self._entries[key] = value, GGUFValueType.STRING, None

    def count(self, key: str, value: int) -> None:
        """Set an unsigned 32-bit integer: counts, sizes, token ids."""
        self._entries[key] = value, GGUFValueType.UINT32, None

    def counts(self, prefix: str, **values: int) -> None:
        """Set several counts, named in full by `prefix` and a dot before each."""
        for key, value in values.items():
            self.count(f"{prefix}.{key}", value)

    def large_count(self, key: str, value: int) -> None:
        """Set an unsigned 64-bit integer."""
        self._entries[key] = value, GGUFValueType.UINT64, None

    def number(self, key: str, value: float) -> None:
        """Set a 32-bit floating-point number."""
        self._entries[key] = value, GGUFValueType.FLOAT32, None

    def flag(self, key: str, value: bool) -> None:
        """Set a truth value."""
        self._entries[key] = value, GGUFValueType.BOOL, None

    def texts(self, key: str, values: Sequence[str]) -> None:
        """Set an array of strings."""
        self._array(key, values, GGUFValueType.STRING)

    def integers(self, key: str, values: Sequence[int]) -> None:
        """Set an array of signed 32-bit integers."""
        self._array(key, values, GGUFValueType.INT32)

    def numbers(self, key: str, values: Sequence[float]) -> None:
        """Set an array of 32-bit floating-point numbers."""
        self._array(key, values, GGUFValueType.FLOAT32)

    def flags(self, key: str, values: Sequence[bool]) -> None:
        """Set an array of truth values."""
        self._array(key, values, GGUFValueType.BOOL)

    def raw(
        self, key: str, value: object, kind: GGUFValueType, element: GGUFValueType | None
    ) -> None:
        """Set a value of any GGUF type, `element` being the type of an array's elements."""
        self._entries[key] = value, kind, element

    def remove(self, key: str) -> None:
        """Leave a key out; one that is not there is no mistake."""
        self._entries.pop(key, None)

    def _array(self, key: str, values: Sequence[Any], element: GGUFValueType) -> None:
        if len(values):
            self._entries[key] = values, GGUFValueType.ARRAY, element


# == The writer: the header, then one tensor or piece at a time ====================================
#
# A file is brought to the disk while it is still being written. Otherwise a system with free memory
# keeps gigabytes of written data there until the last fsync, which then takes as long as the disk
# needs, behind a progress bar at 100 %.


_STRETCH = 128 << 20  # bytes from one sync to the next


class EarlySync:
    """Syncs an open file in a thread, every 128 MiB; leaving the context waits for the last sync.

    A sync that fails raises its OSError from the next call of `wrote`, or at the end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specrun-sync")
        self._running: Future[None] | None = None
        self._waiting = 0

    def __enter__(self) -> EarlySync:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown()
        if error is None and self._running is not None:
            self._running.result()

    def wrote(self, n_bytes: int) -> None:
        """Count the written bytes."""
        self._waiting += n_bytes
        if self._waiting < _STRETCH or (self._running is not None and not self._running.done()):
            return
        if self._running is not None:
            self._running.result()  # raises the error of the sync
        self._waiting = 0
        self._running = self._pool.submit(_sync, self._descriptor)


def _sync(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)


Progress = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes in all."""

STORED_TYPES: dict[str, npt.DTypeLike] = {
    **{"F32": np.float32, "F16": np.float16, "BF16": np.uint16},
    **{"I32": np.int32, "I64": np.int64},
}
"""The plain tensor types, with the numpy type that holds them; BF16 as its 16 bits."""

FLOATS = ("F32", "F16", "BF16")
"""Plain types of weights."""

_CODES = {kind.name: code for code, kind in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written: `shape` has rows first, `type_name` is any GGUF tensor type.

    `load` is called once, when its turn comes, and returns the array in the numpy type of
    `type_name`, or pieces that make it up in order, of which one at a time is in memory. Of a type
    that is not in STORED_TYPES it returns blocks: uint8 with the bytes of a row in place of its
    numbers.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    load: Callable[[], npt.NDArray[Any] | Iterable[npt.NDArray[Any]]]

    @property
    def n_bytes(self) -> int:
        """The size in the file, without padding."""
        return stored_bytes(self.shape, self.type_name)

    @property
    def array_type(self) -> np.dtype[Any]:
        """The numpy type of the result of `load`."""
        return np.dtype(STORED_TYPES.get(self.type_name, np.uint8))

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the result of `load`."""
        if self.type_name in STORED_TYPES:
            return self.shape
        return (*self.shape[:-1], stored_bytes(self.shape[-1:], self.type_name))


def write_gguf(
    output: str | os.PathLike[str],
    architecture: str,
    metadata: Metadata,
    tensors: Sequence[PlannedTensor],
    *,
    force: bool = False,
    progress: Progress | None = None,
    finish: Callable[[Path], None] | None = None,
    source: Path | None = None,
) -> int:
    """Write a GGUF file and return its size in bytes; only one tensor is in memory at a time.

    `finish` gets the path of the complete file before it becomes `output`: an error that it raises
    stops that. The file then needs no trial, unless `source`, the GGUF file that it was made of,
    does. Raises OptionError if `output` exists and `force` is not given, SpecrunError if the disk
    is full; errors of `PlannedTensor.load` pass through. Nothing is left behind on failure.
    """
    target = Path(output)
    check_target(target, force=force)
    known = source is None or is_known_file(source)
    total = sum(tensor.n_bytes for tensor in tensors)
    require_free_space(target.parent, total)
    with unnamed_path(target, force=force) as aside:
        alignment = _write_header(aside, architecture, metadata, tensors)
        with aside.open("ab") as file, EarlySync(file) as synced:
            _write_tensors(file, alignment, tensors, total, progress, synced)
        if finish is not None:
            finish(aside)
        n_bytes = aside.stat().st_size
    if known:
        remember_written(target)
    return n_bytes


def _write_header(
    aside: Path, architecture: str, metadata: Metadata, tensors: Sequence[PlannedTensor]
) -> int:
    """Write everything before the tensors' numbers; return the alignment of their places."""
    writer = GGUFWriter(aside, architecture)
    try:
        for key, value, value_type, element in metadata:
            writer.add_key_value(key, value, value_type, element)
            if key == "general.alignment" and value_type is GGUFValueType.UINT32:
                writer.data_alignment = value
        for tensor in tensors:
            # The type's number, not gguf's name of it: llama.cpp has types that the package does
            # not support. With one given, any numpy type but uint8 lets the shape stay in numbers.
            code: Any = _CODES[tensor.type_name]
            kind = np.dtype(np.float32)
            writer.add_tensor_info(tensor.name, tensor.shape, kind, tensor.n_bytes, code)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return int(writer.data_alignment)
    finally:
        writer.close()


def _write_tensors(
    file: BinaryIO,
    alignment: int,
    tensors: Sequence[PlannedTensor],
    total: int,
    progress: Progress | None,
    synced: EarlySync,
) -> None:
    done = 0
    for tensor in tensors:
        _pad(file, alignment)
        content = tensor.load()
        if isinstance(content, np.ndarray) and content.shape != tensor.array_shape:
            raise _mistake(tensor, f"{content.shape}, not {tensor.array_shape}")
        end = done + tensor.n_bytes
        for piece in [content] if isinstance(content, np.ndarray) else content:
            done += piece.nbytes
            if piece.dtype != tensor.array_type or done > end:
                got = f"{piece.size} numbers of {piece.dtype}, too many for {tensor.type_name}"
                raise _mistake(tensor, got)
            file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            synced.wrote(piece.nbytes)
            if progress is not None:
                progress(done, total)
        if done != end:
            raise _mistake(tensor, f"{end - done} bytes too few")
    if tensors:
        _pad(file, alignment)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _mistake(tensor: PlannedTensor, got: str) -> SpecrunError:
    return SpecrunError(f"the tensor {tensor.name} came out as {got}: this is a mistake in specrun")


_STRING = 8  # the number of the type
_SEARCHED = 1 << 20  # such keys come before the tokens, at the start of the file


def replace_text(path: Path, key: str, old: str, new: str) -> None:
    """Change the value of `key` from `old` to `new`, in place."""
    if len(old.encode()) != len(new.encode()):
        raise SpecrunError(f"the value of {key} must keep its length: this is a mistake in specrun")
    with path.open("r+b") as file:
        head = file.read(_SEARCHED)
        before = struct.pack("<Q", len(key.encode())) + key.encode()
        before += struct.pack("<IQ", _STRING, len(old.encode()))
        place = head.find(before + old.encode())
        if place < 0:
            raise SpecrunError(f"{path} has no {key} to replace: this is a mistake in specrun")
        file.seek(place + len(before))
        file.write(new.encode())
