"""ggml's conversion of rows of numbers: quantized, dequantized, and bfloat16 to float16."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError, OptionError
from specrun.bindings.functions import call
from specrun.bindings.gguf import BLOCK_SIZES, stored_bytes
from specrun.bindings.library import native_function
from specrun.bindings.quantizer.quantizer import ALWAYS_WITH_IMPORTANCE, TENSOR_NUMBERS
from specrun.bindings.threads import available_cores

_CHUNK = 1 << 18  # numbers that one call quantizes
_BLOCK = 1 << 15  # bfloat16 numbers at a time, so that their float32 form stays in the cache


class _TypeTraits(ctypes.Structure):
    """`ggml_type_traits`, as far as it is read here."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def quantize_rows(
    rows: npt.NDArray[np.float32], type_name: str, *, n_threads: int = 0
) -> npt.NDArray[np.uint8]:
    """Return float32 rows [n, width] in a quantized type, as bytes [n, bytes of a row].

    Raises OptionError for a type that weights are not stored in, a width its blocks do not divide,
    or one that needs an importance matrix; MalformedFileError if the numbers cannot be stored (they
    are not finite, or too large).
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    n, width = rows.shape
    if type_name not in TENSOR_NUMBERS or width % BLOCK_SIZES[type_name]:
        raise OptionError(f"rows of {width} numbers cannot be stored as {type_name}")
    if type_name in ALWAYS_WITH_IMPORTANCE:
        raise OptionError(f"{type_name} needs an importance matrix")
    source = np.ascontiguousarray(rows, np.float32)
    output = np.empty((n, stored_bytes((width,), type_name)), np.uint8)
    step = max(1, _CHUNK // width)

    def convert(start: int) -> bool:
        end = min(n, start + step)
        return _quantize(source[start:end], output[start:end], TENSOR_NUMBERS[type_name])

    with ThreadPoolExecutor(n_threads or available_cores()) as pool:
        sound = all(pool.map(convert, range(0, n, step)))
    if not sound:
        problem = f"the numbers cannot be stored as {type_name}"
        raise MalformedFileError(f"{problem}: they are not finite, or too large")
    return output


def dequantize_rows(
    blocks: npt.NDArray[np.uint8], type_name: str, width: int
) -> npt.NDArray[np.float32]:
    """Return the float32 rows [n, width] of quantized bytes [n, bytes of a row]."""
    if type_name not in TENSOR_NUMBERS or blocks.shape[1:] != (stored_bytes((width,), type_name),):
        wanted = f"rows of {width} numbers as {type_name}"
        raise OptionError(f"blocks of shape {blocks.shape} are no {wanted}")
    traits = native_function("ggml_get_type_traits", ctypes.POINTER(_TypeTraits), ctypes.c_int)
    source = np.ascontiguousarray(blocks)
    output = np.empty((len(source), width), np.float32)
    to_float: Any = traits(TENSOR_NUMBERS[type_name]).contents.to_float
    if not to_float:  # F32 itself
        return source.view(np.float32).copy()
    to_float(source.ctypes.data, output.ctypes.data, output.size)
    return output


def _quantize(rows: npt.NDArray[np.float32], output: npt.NDArray[np.uint8], number: int) -> bool:
    first, importance = 0, None
    ends = rows.ctypes.data, output.ctypes.data
    call("ggml_quantize_chunk")(number, *ends, first, *rows.shape, importance)
    return bool(call("ggml_validate_row_data")(number, output.ctypes.data, output.nbytes))


def half_from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float16]:
    """Return bfloat16 numbers, given as their 16 bits, as float16 rounded to nearest, ties to even.

    Several times as fast as numpy. Numbers above 65504 become infinite; Python's lock is free.
    """
    source = np.ascontiguousarray(bits, np.uint16)
    output = np.empty(source.shape, np.float16)
    wide = np.empty(min(_BLOCK, source.size), np.float32)
    widen, narrow = call("ggml_cpu_bf16_to_fp32"), call("ggml_cpu_fp32_to_fp16")
    for start in range(0, source.size, _BLOCK):
        count = min(_BLOCK, source.size - start)
        widen(source.ctypes.data + 2 * start, wide.ctypes.data, count)
        narrow(wide.ctypes.data, output.ctypes.data + 2 * start, count)
    return output
