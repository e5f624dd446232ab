"""Bfloat16, which numpy lacks: the upper 16 bits of a float32, kept here as uint16."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["bfloat16_bits", "half_bits", "widened"]

Bits = npt.NDArray[np.uint16]

_SIGN = np.uint16(0x8000)
_MAGNITUDE = np.uint16(0x7FFF)
_LEAST_NORMAL = np.uint16((127 - 14) << 7)  # 2^-14, the smallest number that float16 holds with all its bits
_EXPONENT_SHIFT = np.uint16((127 - 15) << 7)  # between the biases of the two exponents
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


def half_bits(bits: Bits) -> npt.NDArray[np.float16]:
    """Return bfloat16 numbers of at most 65504 as float16, rounded to nearest.

    Exact from 2^-14 on: the 7 bits of a bfloat16's fraction are the first of a float16's 10, and the exponent
    needs another bias. That is integer arithmetic on 16 bits, several times as fast as the way over float32.
    """
    flat = np.ascontiguousarray(bits).reshape(-1)
    result = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, _BLOCK):
        _convert_block(flat[start : start + _BLOCK], result[start : start + _BLOCK])
    return result.view(np.float16).reshape(bits.shape)


def _convert_block(block: Bits, result: Bits) -> None:
    magnitude = block & _MAGNITUDE
    small = magnitude < _LEAST_NORMAL
    np.subtract(magnitude, _EXPONENT_SHIFT, out=result)
    result <<= np.uint16(3)
    result |= block & _SIGN
    # What is below float16's normal range loses bits: looked up, since about one weight in 400 is.
    places = np.flatnonzero(small)
    if places.size:
        result[places] = _small_halves()[magnitude[places]] | (block[places] & _SIGN)


@functools.cache
def _small_halves() -> npt.NDArray[Any]:
    """Return the float16 bits of every bfloat16 magnitude below 2^-14."""
    return widened(np.arange(_LEAST_NORMAL, dtype=np.uint16)).astype(np.float16).view(np.uint16)
