"""ggml's C functions with their prototypes, and its tensors."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.library import native_function

# == Functions =====================================================================================


F32, F16, I32, I64 = 0, 1, 26, 27
"""Numbers of ggml's plain types (enum ggml_type)."""

_POINTER, _INT, _FLOAT, _BOOL = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_bool
_INT64, _SIZE = ctypes.c_int64, ctypes.c_size_t
_INT64S = ctypes.POINTER(ctypes.c_int64)


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", _BOOL))


class TensorFields(ctypes.Structure):
    """The beginning of ggml_tensor: the fields that are read here."""

    _fields_ = (("type", _INT), ("buffer", _POINTER), ("ne", _INT64 * 4), ("nb", _SIZE * 4))


# An operation takes the context first and returns a tensor; the letters are its other arguments.
_LETTERS = {"t": _POINTER, "i": _INT, "l": _INT64, "s": _SIZE, "f": _FLOAT}
_OPERATIONS = {
    "ggml_add": "tt",
    "ggml_argmax": "t",
    "ggml_argsort": "ti",
    "ggml_cast": "ti",
    "ggml_concat": "tti",
    "ggml_cont": "t",
    "ggml_cpy": "tt",
    "ggml_get_rows": "tt",
    "ggml_log": "t",
    "ggml_mul": "tt",
    "ggml_mul_mat": "tt",
    "ggml_permute": "tiiii",
    "ggml_reshape_2d": "tll",
    "ggml_reshape_3d": "tlll",
    "ggml_rms_norm": "tf",
    "ggml_rope_ext": "tttiiiffffff",
    "ggml_scale": "tf",
    "ggml_set_rows": "ttt",
    "ggml_silu": "t",
    "ggml_soft_max": "t",
    "ggml_soft_max_ext": "ttff",
    "ggml_sub": "tt",
    "ggml_swiglu_split": "tt",
    "ggml_top_k": "ti",
    "ggml_view_2d": "tllss",
    "ggml_view_3d": "tlllsss",
}
# A function's result, then its arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_init": (_POINTER, InitParams),
    "ggml_free": (None, _POINTER),
    "ggml_tensor_overhead": (_SIZE,),
    "ggml_graph_overhead_custom": (_SIZE, _SIZE, _BOOL),
    "ggml_new_tensor": (_POINTER, _POINTER, _INT, _INT, _INT64S),
    "ggml_new_graph_custom": (_POINTER, _POINTER, _SIZE, _BOOL),
    "ggml_build_forward_expand": (None, _POINTER, _POINTER),
    "ggml_set_input": (None, _POINTER),
    "ggml_set_output": (None, _POINTER),
    "ggml_set_name": (_POINTER, _POINTER, ctypes.c_char_p),
    "ggml_nbytes": (_SIZE, _POINTER),
    "ggml_get_data": (_POINTER, _POINTER),
    "ggml_blck_size": (_INT64, _INT),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, _POINTER, _POINTER),
    "ggml_backend_buffer_clear": (None, _POINTER, ctypes.c_uint8),
    "ggml_backend_buffer_free": (None, _POINTER),
    "ggml_backend_buffer_get_type": (_POINTER, _POINTER),
    "ggml_backend_buffer_is_host": (_BOOL, _POINTER),
    "ggml_backend_buffer_set_usage": (None, _POINTER, _INT),
    "ggml_backend_buft_get_device": (_POINTER, _POINTER),
    "ggml_backend_buft_name": (ctypes.c_char_p, _POINTER),
    "ggml_backend_dev_by_type": (_POINTER, _INT),
    "ggml_backend_dev_init": (_POINTER, _POINTER, ctypes.c_char_p),
    "ggml_backend_dev_name": (ctypes.c_char_p, _POINTER),
    "ggml_backend_free": (None, _POINTER),
    "ggml_backend_get_default_buffer_type": (_POINTER, _POINTER),
    "ggml_backend_sched_alloc_graph": (_BOOL, _POINTER, _POINTER),
    "ggml_backend_sched_free": (None, _POINTER),
    "ggml_backend_sched_graph_compute": (_INT, _POINTER, _POINTER),
    "ggml_backend_sched_new": (_POINTER, _POINTER, _POINTER, _INT, _SIZE, _BOOL, _BOOL),
    "ggml_backend_supports_op": (_BOOL, _POINTER, _POINTER),
    "ggml_backend_tensor_get": (None, _POINTER, _POINTER, _SIZE, _SIZE),
    "ggml_backend_tensor_set": (None, _POINTER, _POINTER, _SIZE, _SIZE),
    "ggml_backend_cpu_set_n_threads": (None, _POINTER, _INT),
}


@functools.cache
def call(name: str) -> Any:  # noqa: ANN401 - a ctypes function
    """Return a function of ggml, ready to be called."""
    if name in _OPERATIONS:
        arguments = (_LETTERS[letter] for letter in _OPERATIONS[name])
        return native_function(name, _POINTER, _POINTER, *arguments)
    return native_function(name, *_FUNCTIONS[name])


def fields(tensor: int) -> TensorFields:
    """Return the fields of a tensor, which must be alive."""
    return TensorFields.from_address(tensor)


# == Tensors (ggml_tensor): sizes, strides and type of a graph's node or a weight ==================


DTYPES: Mapping[int, npt.DTypeLike]
DTYPES = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}
"""numpy's types of ggml's plain ones."""


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
