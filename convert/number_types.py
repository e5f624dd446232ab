"""From one number type of weights to another, refusing what would be lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError

__all__ = ["stored_as"]

# The largest number that does not become infinite when it is rounded to the type.
_LARGEST = {"F16": 65504.0, "BF16": 3.3895e38, "F32": float(np.finfo(np.float32).max)}


def stored_as(array: npt.NDArray[Any], type_name: str, shown: str) -> npt.NDArray[Any]:
    """Return floating-point numbers as F32, F16 or BF16 (its 16 bits as uint16), rounded to nearest.

    Raises MalformedFileError if a number is not finite, UnsupportedModelError if one is too large for
    the type; `shown` names the tensor.
    """
    if not np.issubdtype(array.dtype, np.floating):
        raise UnsupportedModelError(f"{shown} holds {array.dtype} numbers, where floating-point ones are needed")
    largest = max(float(np.max(array)), -float(np.min(array))) if array.size else 0.0
    if not np.isfinite(largest):
        raise MalformedFileError(f"{shown} holds numbers that are not finite: the checkpoint is damaged")
    if largest > _LARGEST[type_name]:
        kind = type_name.lower()
        raise UnsupportedModelError(f"{shown} holds {largest:g}, too large for {kind}: convert to bf16 or f32")
    if type_name == "F16":
        return array.astype(np.float16, copy=False)
    wide = array.astype(np.float32, copy=False)
    return wide if type_name == "F32" else _bfloat16_bits(wide)


def _bfloat16_bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(array).view(np.uint32)
    # Adding just under half of the last kept bit, plus that bit, rounds ties to even.
    last = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + last) >> np.uint32(16)).astype(np.uint16)
