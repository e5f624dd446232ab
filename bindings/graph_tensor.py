"""ggml's tensors as they stand in an evaluation graph, seen through numpy."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import SpecrunError
from specrun.bindings.library import native_function

__all__ = ["F32", "GraphTensor", "operation_number", "tensor_array", "tensor_at"]

F32 = 0
"""ggml's number of the type of 32-bit floating-point numbers."""

_OBJECT_BYTES = 32  # GGML_OBJECT_SIZE, which ggml_tensor_overhead counts, too
_NUMPY_TYPES: dict[int, type[np.generic]] = {F32: np.float32, 26: np.int32}


class GraphTensor(ctypes.Structure):
    """`ggml_tensor`: shape `ne` (row length first), strides in bytes `nb`, operation and sources."""

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


def tensor_at(address: int) -> GraphTensor:
    """Return the tensor at an address that ggml gave."""
    return GraphTensor.from_address(address)


@functools.cache
def operation_number(name: str) -> int:
    """Return ggml's number of an operation such as "MUL_MAT"; raises SpecrunError if there is none.

    The first call also checks that tensors look as this module reads them.
    """
    there = int(native_function("ggml_tensor_overhead", ctypes.c_size_t)())
    if there != ctypes.sizeof(GraphTensor) + _OBJECT_BYTES:
        raise SpecrunError("this llama.cpp has another ggml_tensor than specrun reads: install the pinned version")
    name_of = native_function("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
    for number in range(256):
        if name_of(number) == name.encode():
            return number
    raise SpecrunError(f"this llama.cpp has no operation {name}: install the pinned version")


def tensor_array(tensor: GraphTensor) -> npt.NDArray[Any]:
    """Return a computed tensor of F32 or I32 as an array, its shape in numpy's order [ne3, ne2, ne1, ne0].

    A view where the numbers lie in the machine's memory, valid until ggml reuses that memory; a copy from
    any other device.
    """
    kind = np.dtype(_NUMPY_TYPES[tensor.type])
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    n_bytes = kind.itemsize + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if native_function("ggml_backend_buffer_is_host", ctypes.c_bool, ctypes.c_void_p)(tensor.buffer):
        memory = (ctypes.c_uint8 * n_bytes).from_address(tensor.data)
    else:
        memory = (ctypes.c_uint8 * n_bytes)()
        arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
        native_function("ggml_backend_tensor_get", None, *arguments)(
            ctypes.addressof(tensor), ctypes.addressof(memory), 0, n_bytes
        )
    return np.ndarray(shape, kind, memory, strides=strides)
