"""ggml's tensors (ggml_tensor): sizes, strides and type of a graph's node or a weight."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.functions import call
from specrun.bindings.library import NativeHandle, native_function

F32, F16, I32, I64 = 0, 1, 26, 27
"""Numbers of ggml's plain types (enum ggml_type)."""

DTYPES: Mapping[int, npt.DTypeLike]
DTYPES = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}
"""numpy's types of ggml's plain ones."""


class _InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (
        *(("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p)),
        ("no_alloc", ctypes.c_bool),
    )


class TensorFields(ctypes.Structure):
    """`ggml_tensor`: shape `ne` (row length first), strides `nb` in bytes, operation, sources."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


def new_context(n_bytes: int) -> NativeHandle:
    """Return a ggml context for descriptions of tensors; their numbers get memory elsewhere."""
    make = native_function("ggml_init", ctypes.c_void_p, _InitParams)
    return NativeHandle(make(_InitParams(n_bytes, None, True)), call("ggml_free"))


def new_tensor(context: NativeHandle | None, type_number: int, shape: Sequence[int]) -> int:
    """Return the handle of a new tensor, fastest dimension first."""
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    handle: int = call("ggml_new_tensor")(context, type_number, len(shape), sizes)
    return handle


def fields(tensor: int) -> TensorFields:
    """Return the fields of a tensor, which must be alive."""
    return TensorFields.from_address(tensor)


class Tensor:
    """A node of a graph under construction, or a weight it reads."""

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The four sizes, fastest dimension first."""
        a, b, c, d = fields(self.handle).ne
        return a, b, c, d

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Bytes from one element to the next in each dimension."""
        a, b, c, d = fields(self.handle).nb
        return a, b, c, d

    @property
    def type(self) -> int:
        """ggml's number of the element type."""
        number: int = fields(self.handle).type
        return number

    @property
    def n_elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """numpy's shape: dimensions reversed, without leading ones (at least two dimensions)."""
        shape = list(self.shape)
        while len(shape) > 2 and shape[-1] == 1:
            shape.pop()
        return tuple(reversed(shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie in order without gaps; strides of sizes 1 do not matter."""
        shape, strides = self.shape, self.strides
        # Quantized types pack blocks of a row: only the dimensions above it count.
        expected = strides[0] * shape[0] if self.type in DTYPES else strides[1]
        for size, stride in zip(shape[1:], strides[1:], strict=True):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True
