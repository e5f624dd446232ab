"""Number types of weights: conversions that refuse what would be lost.

Bfloat16, which numpy lacks, is the upper 16 bits of a float32, kept here as uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.bindings.quantizer import half_from_bfloat16

Bits = npt.NDArray[np.uint16]

# The largest number that does not become infinite when it is rounded to the type.
_LARGEST = {"F16": 65504.0, "BF16": 3.3895e38, "F32": float(np.finfo(np.float32).max)}
_MAGNITUDE = np.uint16(0x7FFF)
_BLOCK = 1 << 16  # numbers at a time, so that what lies between the steps stays in the cache


def widened(bits: Bits) -> npt.NDArray[np.float32]:
    """Return the numbers as float32, which holds every bfloat16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bfloat16_bits(array: npt.NDArray[np.float32]) -> Bits:
    """Return float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    # Adding just under half of the last kept bit, plus that bit, rounds ties to even.
    last = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + last) >> np.uint32(16)).astype(np.uint16)


def stored_as(array: npt.NDArray[Any], type_name: str, shown: str) -> npt.NDArray[Any]:
    """Return numbers as F32, F16 or BF16 (as uint16), rounded to nearest; whole numbers as I64.

    Raises MalformedFileError if a number is not finite, UnsupportedModelError if one is too large
    for the type; `shown` names the tensor.
    """
    wanted = np.signedinteger if type_name == "I64" else np.floating
    if not np.issubdtype(array.dtype, wanted):
        needed = "whole" if type_name == "I64" else "floating-point"
        raise UnsupportedModelError(f"{shown} holds {array.dtype} numbers: they must be {needed}")
    if type_name == "I64":
        return array.astype(np.int64, copy=False)
    largest = max(float(np.max(array)), -float(np.min(array))) if array.size else 0.0
    _check_largest(largest, type_name, shown)
    if type_name == "F16":
        return array.astype(np.float16, copy=False)
    wide = array.astype(np.float32, copy=False)
    return wide if type_name == "F32" else bfloat16_bits(wide)


def raw_stored_as(
    raw: npt.NDArray[Any], source_type: str, type_name: str, shown: str
) -> npt.NDArray[Any]:
    """Return the numbers of a checkpoint, in the numpy type of `source_type`, as `stored_as` would.

    Bfloat16 comes as its 16 bits, widened only where it must be. Raises as `stored_as` does.
    """
    if source_type != "BF16" or type_name == "F32":
        return stored_as(widened(raw) if source_type == "BF16" else raw, type_name, shown)
    # Magnitudes are ordered as their bits are, and what is not finite comes last.
    largest = float(widened(np.array([_largest_magnitude(raw)], np.uint16))[0])
    _check_largest(largest, "F32" if type_name == "BF16" else type_name, shown)
    return raw if type_name == "BF16" else half_from_bfloat16(raw)


def _largest_magnitude(bits: npt.NDArray[np.uint16]) -> int:
    """Return the largest of the bits without their sign, 0 of none."""
    magnitudes = np.empty(min(_BLOCK, bits.size), np.uint16)
    largest = 0
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        np.bitwise_and(block, _MAGNITUDE, out=magnitudes[: block.size])
        largest = max(largest, int(magnitudes[: block.size].max()))
    return largest


def _check_largest(largest: float, type_name: str, shown: str) -> None:
    if not np.isfinite(largest):
        raise MalformedFileError(f"{shown} holds numbers that are not finite: it is damaged")
    if largest > _LARGEST[type_name]:
        raise UnsupportedModelError(
            f"{shown} holds {largest:g}, too large for {type_name.lower()}: convert to bf16 or f32"
        )
