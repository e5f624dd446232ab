"""Bfloat16, which numpy lacks: the upper 16 bits of a float32, kept here as uint16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["bfloat16_bits", "widened"]

Bits = npt.NDArray[np.uint16]


def widened(bits: Bits) -> npt.NDArray[np.float32]:
    """Return the numbers as float32, which holds every bfloat16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bfloat16_bits(array: npt.NDArray[np.float32]) -> Bits:
    """Return float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    # Adding just under half of the last kept bit, plus that bit, rounds ties to even.
    last = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + last) >> np.uint32(16)).astype(np.uint16)
