"""Tensors that outlive graphs: weights and caches of heads, and matrices of the target."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import (
    ClosedError,
    MalformedFileError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from specrun.bindings.functions import call
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.graph import GraphBuilder
from specrun.bindings.ggml.tensor import F32, I32, Tensor, fields, new_context, new_tensor
from specrun.bindings.gguf import TENSOR_TYPES, TensorInfo, read_header
from specrun.bindings.library import NativeHandle, exported_function
from specrun.bindings.machine.placement import current_placement, resolve_placement
from specrun.bindings.models.model import Model

# == A head's weights, read from a GGUF file, and its key-value cache ==============================


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
        self._context: NativeHandle | None = new_context(memory)
        for name, (type_name, shape) in shapes.items():
            self._tensors[name] = new_tensor(self._context, _NUMBERS[type_name], shape)
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
        # The scheduler then computes an operation on the device of its weights: no copies.
        call("ggml_backend_buffer_set_usage")(self._buffer, _WEIGHTS)
        # A masked cell is multiplied by 0: NaN in the memory would stay NaN.
        call("ggml_backend_buffer_clear")(self._buffer, 0)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> int:
        if self._context is None:
            raise ClosedError("the tensors are closed")
        return self._tensors[name]

    def find(self, name: str) -> Tensor | None:
        """Return a tensor, None if there is none."""
        return Tensor(self[name]) if name in self._tensors else None

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
    chosen = _tensors(path, names)
    store = TensorStore(device, {info.name: (info.type_name, info.shape) for info in chosen})
    with _mapped(path, store) as data:
        for info in chosen:
            _copy(store, info, data)
    return store


def _load_rows(
    path: str | os.PathLike[str], device: ComputeDevice, name: str, rows: npt.NDArray[np.integer]
) -> TensorStore:
    """Read some rows of a matrix of a GGUF file, in the order of `rows`, in its own type.

    Raises MalformedFileError if the file has no such matrix.
    """
    info = _tensors(path, [name])[0]
    width, n_rows = (*info.shape, 1)[:2]
    store = TensorStore(device, {name: (info.type_name, (width, len(rows)))})
    with _mapped(path, store) as data:
        whole = np.frombuffer(data, np.uint8, info.n_bytes, info.offset)
        chosen = whole.reshape(n_rows, -1)[rows]
        del whole  # a view that is still alive would keep the file's mapping from being closed
        store.write(name, chosen)
    return store


@contextmanager
def _mapped(path: str | os.PathLike[str], store: TensorStore) -> Iterator[mmap.mmap]:
    """Yield a file's bytes to fill a store, which is closed on any exception."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except BaseException:
        store.close()
        raise


def read_numbers(path: str | os.PathLike[str], name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a copy of a tensor's numbers, flat, if it is stored as `dtype`.

    Raises MalformedFileError if the file has no such tensor.
    """
    info = _tensors(path, [name])[0]
    with open(path, "rb") as file:
        file.seek(info.offset)
        return np.frombuffer(file.read(info.n_bytes), dtype)


def _tensors(path: str | os.PathLike[str], names: Iterable[str] | None) -> list[TensorInfo]:
    known = {tensor.name: tensor for tensor in read_header(path).tensors}
    wanted = list(known if names is None else names)
    for name in wanted:
        if name not in known:
            problem = f"{os.fspath(path)} has no tensor {name}"
            raise MalformedFileError(f"{problem}: is it complete, and of the right kind?")
    return [known[name] for name in wanted]


def _copy(store: TensorStore, info: TensorInfo, data: mmap.mmap) -> None:
    """Copy a tensor piece by piece, so that a large one is never in memory twice."""
    with memoryview(data) as view:
        for start in range(0, info.n_bytes, _PIECE):
            end = min(info.n_bytes, start + _PIECE)
            piece = np.frombuffer(view, np.uint8, end - start, info.offset + start)
            store.write(info.name, piece, start)
            # A view that is still alive would keep the file's mapping from being closed.
            del piece


# == The target's embedding and output matrices, for heads that read or predict its tokens =========
#
# They are shared if ggml can reach them: the head's graph names the tensor itself, in llama.cpp's
# place and form. They are loaded from the target's GGUF once more if llama.cpp's build hides them,
# if they are on a device that the head does not compute on, or if the operation cannot read their
# form (rows of a repacked matrix).


logger = logging.getLogger("specrun.heads")

# const ggml_tensor * llama_model::get_tensor(const char *) const: not part of the C interface.
# Compilers on Unix export it all the same; Visual C++ (Q: a public method, E: by a pointer of 64
# bits, B: const) only if it is set to export everything.
_GET = (
    "_ZNK11llama_model10get_tensorEPKc",
    "?get_tensor@llama_model@@QEBAPEBUggml_tensor@@PEBD@Z",
)
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


class TargetTensors:
    """Matrices of an open model, loaded when needed. Close it before the model and the device."""

    def __init__(self, model: Model, device: ComputeDevice) -> None:
        self._model = model
        self._device = device
        self._loaded: list[TensorStore] = []
        self._known: dict[tuple[str, bool], Tensor] = {}
        names = {tensor.name for tensor in model.header.tensors}
        # Tied models use the embedding for both.
        self._output_name = _OUTPUT if _OUTPUT in names else _EMBEDDING
        self.shared: dict[str, bool] = {}
        """Which matrices are the model's own memory; the others were loaded again."""

    def embedding(self) -> Tensor:
        """Return the matrix of token embeddings, (hidden, vocabulary)."""
        return self.table(_EMBEDDING)

    def output(self) -> Tensor:
        """Return the output matrix, (hidden, vocabulary): the embedding in models that tie them."""
        return self.named(self._output_name)

    def output_rows(self, tokens: npt.NDArray[np.integer]) -> Tensor:
        """Return the output matrix of some tokens alone, (hidden, n): a copy of their rows."""
        store = _load_rows(self._model.path, self._device, self._output_name, tokens)
        self._loaded.append(store)
        return Tensor(store[self._output_name])

    def table(self, name: str) -> Tensor:
        """Return a matrix whose rows are looked up, by its name in the file."""
        return self._reachable(name, rows=True)

    def named(self, name: str) -> Tensor:
        """Return a matrix to multiply by, or a vector of a norm, by its name in the file."""
        return self._reachable(name, rows=False)

    def close(self) -> None:
        """Free the matrices that were loaded again."""
        self._known.clear()
        while self._loaded:
            self._loaded.pop().close()

    def _reachable(self, name: str, *, rows: bool) -> Tensor:
        if (name, rows) in self._known:
            return self._known[name, rows]
        tensor = _tensor_of(self._model, name)
        self.shared[name] = tensor is not None and self._usable(tensor, rows=rows)
        if tensor is None or not self.shared[name]:
            known = self._model.header.tensors
            size = sum(each.n_bytes for each in known if each.name == name) / 1e6
            logger.info("%s cannot be shared: %.0f MB are loaded again for a head", name, size)
            store = load_tensors(self._model.path, self._device, [name])
            self._loaded.append(store)
            tensor = Tensor(store[name])
        self._known[name, rows] = tensor
        return tensor

    def _usable(self, tensor: Tensor, *, rows: bool) -> bool:
        """Whether its operation can be computed with the tensor in its place."""
        place = _device_of(tensor)
        if place and place not in self._device.devices:
            return False
        builder = GraphBuilder(self._device, max_operations=1)
        try:
            if rows:
                builder.get_rows(tensor, builder.input("rows", I32, 1))
            else:
                builder.mul_mat(tensor, builder.input("x", F32, tensor.shape[0], 1))
        except UnsupportedModelError:
            return False
        finally:
            builder.close()
        return True


def device_for_heads(model: Model) -> int:
    """Return the native handle of the device that a target's heads are computed on, 0: the CPU.

    That is the device of its output matrix, unless devices were chosen for drafts (`placing`).
    """
    placement = current_placement()
    if placement.devices_draft is not None:
        chosen = resolve_placement(placement.for_drafts).offload
        return chosen[0].handle if chosen else 0
    if not model.n_gpu_layers:
        return 0
    tensor = _tensor_of(model, _OUTPUT) or _tensor_of(model, _EMBEDDING)
    if tensor is not None and tensor.handle:
        return _device_of(tensor)
    # This build shows no tensors. The output matrix is offloaded last, behind all layers.
    everything = model.n_gpu_layers < 0 or model.n_gpu_layers > model.n_layer
    return model.placed.offload[-1].handle if everything else 0


def device_of_tensor(model: Model, name: str) -> int:
    """Return the native handle of the device where a tensor lies, 0: this machine's memory.

    Also if the model has no such tensor, or this build shows none.
    """
    tensor = _tensor_of(model, name)
    return 0 if tensor is None else _device_of(tensor)


def _device_of(tensor: Tensor) -> int:
    """Return the native handle of the device in whose memory a tensor lies, 0: in the CPU's."""
    buffer = fields(tensor.handle).buffer
    if not buffer or call("ggml_backend_buffer_is_host")(buffer):
        return 0
    kind = call("ggml_backend_buffer_get_type")(buffer)
    device: int | None = call("ggml_backend_buft_get_device")(kind)
    return device or 0


def _tensor_of(model: Model, name: str) -> Tensor | None:
    """Return a tensor of an open model, None if this build of llama.cpp does not export them."""
    try:
        find = exported_function(_GET, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    except UnsupportedModelError:
        return None
    handle: int | None = find(model.handle, name.encode())
    return Tensor(handle) if handle else None
