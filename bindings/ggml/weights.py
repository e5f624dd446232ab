"""Tensors that outlive graphs: a head's weights, read from a GGUF file, and its key-value cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import ClosedError, MalformedFileError, OutOfMemoryError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import InitParams, call, fields
from specrun.bindings.gguf import TENSOR_TYPES, TensorInfo, read_header
from specrun.bindings.library import NativeHandle

_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
_PIECE = 16 << 20


class TensorStore:
    """Named tensors in one buffer of a device, zero until written.

    `shapes` gives name -> (type name as in GGUF files, shape). Shapes are in ggml's order, fastest
    dimension first: a matrix of [rows, columns] is (columns, rows).
    """

    def __init__(
        self, device: ComputeDevice, shapes: Mapping[str, tuple[str, Sequence[int]]]
    ) -> None:
        self._tensors: dict[str, int] = {}
        self._buffer: NativeHandle | None = None
        memory = call("ggml_tensor_overhead")() * (len(shapes) + 1)
        made = call("ggml_init")(InitParams(memory, None, True))
        self._context: NativeHandle | None = NativeHandle(made, call("ggml_free"))
        for name, (type_name, shape) in shapes.items():
            sizes = (ctypes.c_int64 * len(shape))(*shape)
            tensor = call("ggml_new_tensor")(self._context, _NUMBERS[type_name], len(shape), sizes)
            self._tensors[name] = tensor
        if not shapes:
            return
        allocate = call("ggml_backend_alloc_ctx_tensors_from_buft")
        buffer = allocate(self._context, device.buffer_type)
        if not buffer:
            total = sum(call("ggml_nbytes")(tensor) for tensor in self._tensors.values()) / 1e6
            self.close()
            problem = f"there is no room for {total:,.0f} MB of tensors on the compute device"
            raise OutOfMemoryError(problem)
        free = device.freeing("ggml_backend_buffer_free")
        self._buffer = NativeHandle(buffer, free, self._context, *device.backends)
        # The scheduler then computes an operation where its weights lie, instead of copying them.
        call("ggml_backend_buffer_set_usage")(self._buffer, _WEIGHTS)
        # A masked cell is multiplied by 0: what lay in the memory before could be NaN, and stay it.
        call("ggml_backend_buffer_clear")(self._buffer, 0)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> int:
        if self._context is None:
            raise ClosedError("the tensors are closed")
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's four sizes, fastest dimension first."""
        return tuple(fields(self[name]).ne)

    def write(
        self, name: str, data: memoryview | bytes | npt.NDArray[np.generic], offset: int = 0
    ) -> None:
        """Copy bytes into a tensor from byte `offset` on."""
        is_array = isinstance(data, np.ndarray)
        array = np.ascontiguousarray(data) if is_array else np.frombuffer(data, np.uint8)
        if offset < 0 or offset + array.nbytes > call("ggml_nbytes")(self[name]):
            raise ValueError(f"{array.nbytes} bytes from {offset} on do not fit tensor {name}")
        call("ggml_backend_tensor_set")(self[name], array.ctypes.data, offset, array.nbytes)

    def read(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return a copy of a tensor's bytes as a flat array."""
        result = np.empty(call("ggml_nbytes")(self[name]), np.uint8)
        call("ggml_backend_tensor_get")(self[name], result.ctypes.data, 0, result.nbytes)
        return result.view(dtype)

    def close(self) -> None:
        """Free the tensors; calling it again does nothing."""
        self._buffer = self._context = None


def load_tensors(
    path: str | os.PathLike[str], device: ComputeDevice, names: Iterable[str] | None = None
) -> TensorStore:
    """Read tensors of a GGUF file, all or those of `names`, in the types they are stored in.

    The header is checked first, against the file's size too; a missing name is a
    MalformedFileError.
    """
    header = read_header(path)
    known = {tensor.name: tensor for tensor in header.tensors}
    wanted = list(known if names is None else names)
    for name in wanted:
        if name not in known:
            problem = f"{os.fspath(path)} has no tensor {name}"
            raise MalformedFileError(f"{problem}: is it complete, and of the right kind?")
    chosen = [known[name] for name in wanted]
    store = TensorStore(device, {info.name: (info.type_name, info.shape) for info in chosen})
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for info in chosen:
                _copy(store, info, data)
    except BaseException:
        store.close()
        raise
    return store


def load_rows(
    path: str | os.PathLike[str], device: ComputeDevice, name: str, rows: npt.NDArray[np.integer]
) -> TensorStore:
    """Read some rows of a matrix of a GGUF file, in the order of `rows`, in its own type.

    Raises MalformedFileError where the file has no such matrix.
    """
    info = _tensor_info(path, name)
    width, n_rows = (*info.shape, 1)[:2]
    store = TensorStore(device, {name: (info.type_name, (width, len(rows)))})
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            whole = np.frombuffer(data, np.uint8, info.n_bytes, info.offset)
            chosen = whole.reshape(n_rows, -1)[rows]
            del whole  # a view that is still alive would keep the file's mapping from being closed
            store.write(name, chosen)
    except BaseException:
        store.close()
        raise
    return store


def read_numbers(path: str | os.PathLike[str], name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a copy of a tensor's numbers, flat, where it is stored as `dtype`.

    Raises MalformedFileError where the file has no such tensor.
    """
    info = _tensor_info(path, name)
    with open(path, "rb") as file:
        file.seek(info.offset)
        return np.frombuffer(file.read(info.n_bytes), dtype)


def _tensor_info(path: str | os.PathLike[str], name: str) -> TensorInfo:
    for info in read_header(path).tensors:
        if info.name == name:
            return info
    problem = f"{os.fspath(path)} has no tensor {name}"
    raise MalformedFileError(f"{problem}: is it complete, and of the right kind?")


def _copy(store: TensorStore, info: TensorInfo, data: mmap.mmap) -> None:
    """Copy a tensor piece by piece, so that a large one is never in memory twice."""
    with memoryview(data) as view:
        for start in range(0, info.n_bytes, _PIECE):
            end = min(info.n_bytes, start + _PIECE)
            piece = np.frombuffer(view, np.uint8, end - start, info.offset + start)
            store.write(info.name, piece, start)
            # A view that is still alive would keep the file's mapping from being closed.
            del piece
