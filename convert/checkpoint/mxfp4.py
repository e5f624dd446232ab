"""MXFP4 (OCP microscaling): 32 numbers of 4 bits with a power of two for all of them.

A checkpoint has the powers apart from the numbers, two neighbours in a byte, the first in its lower
half. A GGUF file has the power in front, and the first half of the numbers in the lower halves of
16 bytes, the other in the upper ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_LOW, _BITS = np.uint8(15), np.uint8(4)
_BIAS = 127  # of the powers' exponents


def gguf_blocks(blocks: npt.NDArray[Any], scales: npt.NDArray[Any]) -> Bytes:
    """Return blocks [..., n, 16] with scales [..., n] as the bytes of rows, [..., n * 17]."""
    numbers = np.stack([blocks & _LOW, blocks >> _BITS], axis=-1).reshape(*scales.shape, 2, 16)
    halves = numbers[..., 0, :] | (numbers[..., 1, :] << _BITS)
    rows = np.concatenate([scales[..., None], halves], axis=-1).astype(np.uint8)
    return rows.reshape(*scales.shape[:-1], -1)


def block_numbers(rows: Bytes) -> npt.NDArray[np.float32]:
    """Return the numbers of such rows, [..., n * 32]."""
    blocks = rows.reshape(*rows.shape[:-1], -1, 17)
    halves = blocks[..., 1:]
    codes = np.concatenate([halves & _LOW, halves >> _BITS], axis=-1)
    signed = np.concatenate([_VALUES, -_VALUES])[codes]
    powers = np.ldexp(np.float32(1.0), blocks[..., :1].astype(np.int32) - _BIAS)
    numbers: npt.NDArray[np.float32] = (signed * powers).astype(np.float32)
    return numbers.reshape(*rows.shape[:-1], -1)
