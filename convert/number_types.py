"""From one number type of weights to another, refusing what would be lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.bfloat16 import bfloat16_bits, half_bits, widened

__all__ = ["raw_stored_as", "stored_as"]

# The largest number that does not become infinite when it is rounded to the type.
_LARGEST = {"F16": 65504.0, "BF16": 3.3895e38, "F32": float(np.finfo(np.float32).max)}


def stored_as(array: npt.NDArray[Any], type_name: str, shown: str) -> npt.NDArray[Any]:
    """Return floating-point numbers as F32, F16 or BF16 (its 16 bits as uint16), rounded to nearest; whole ones as I64.

    Raises MalformedFileError if a number is not finite, UnsupportedModelError if one is too large for
    the type; `shown` names the tensor.
    """
    if type_name == "I64":
        if not np.issubdtype(array.dtype, np.signedinteger):
            raise UnsupportedModelError(f"{shown} holds {array.dtype} numbers, where whole ones are needed")
        return array.astype(np.int64, copy=False)
    if not np.issubdtype(array.dtype, np.floating):
        raise UnsupportedModelError(f"{shown} holds {array.dtype} numbers, where floating-point ones are needed")
    largest = max(float(np.max(array)), -float(np.min(array))) if array.size else 0.0
    _check_largest(largest, type_name, shown)
    if type_name == "F16":
        return array.astype(np.float16, copy=False)
    wide = array.astype(np.float32, copy=False)
    return wide if type_name == "F32" else bfloat16_bits(wide)


def raw_stored_as(raw: npt.NDArray[Any], source_type: str, type_name: str, shown: str) -> npt.NDArray[Any]:
    """Return the numbers of a checkpoint, in the numpy type of `source_type`, as `stored_as` would.

    Bfloat16 comes as its 16 bits and is never widened where it need not be. Raises as `stored_as` does.
    """
    if source_type != "BF16" or type_name == "F32":
        return stored_as(widened(raw) if source_type == "BF16" else raw, type_name, shown)
    # Magnitudes are ordered as their bits are, and what is not finite comes last.
    largest = float(widened(np.max(raw & np.uint16(0x7FFF), keepdims=True))[0]) if raw.size else 0.0
    _check_largest(largest, "F32" if type_name == "BF16" else type_name, shown)
    return raw if type_name == "BF16" else half_bits(raw)


def _check_largest(largest: float, type_name: str, shown: str) -> None:
    if not np.isfinite(largest):
        raise MalformedFileError(f"{shown} holds numbers that are not finite: the checkpoint is damaged")
    if largest > _LARGEST[type_name]:
        kind = type_name.lower()
        raise UnsupportedModelError(f"{shown} holds {largest:g}, too large for {kind}: convert to bf16 or f32")
