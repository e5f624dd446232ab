"""Tensors of random numbers for files that nobody trained: drawn, and quantized, a piece at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.row_quantizer import quantize_rows
from specrun.convert.writer import STORED_TYPES, PlannedTensor

__all__ = ["random_matrix", "random_vector"]

_PIECE = 1 << 22  # numbers drawn at a time


def random_matrix(name: str, shape: tuple[int, int], type_name: str, *, seed: int, spread: float) -> PlannedTensor:
    """Return a matrix of normal numbers around 0 whose standard deviation is `spread`, of F32, F16 or a quantized type.

    Same name, shape, seed and spread, same numbers, whatever else a file holds. Quantized types need rows that their
    blocks divide; writing raises OptionError for others.
    """

    def load() -> Iterator[npt.NDArray[Any]]:
        source = _source(seed, name)
        rows = max(1, _PIECE // shape[1])
        for start in range(0, shape[0], rows):
            numbers = source.standard_normal((min(rows, shape[0] - start), shape[1]), dtype=np.float32)
            numbers *= np.float32(spread)
            if type_name in STORED_TYPES:
                yield numbers.astype(STORED_TYPES[type_name])
            else:
                yield quantize_rows(numbers, type_name)

    return PlannedTensor(f"{name}.weight", shape, type_name, load)


def random_vector(
    name: str, size: int, *, seed: int, mean: float, spread: float, part: str = "weight"
) -> PlannedTensor:
    """Return a float32 vector of normal numbers around `mean`: the weights of a norm, or with `part` "bias" a bias."""

    def load() -> npt.NDArray[Any]:
        numbers = _source(seed, name).standard_normal((size,), dtype=np.float32)
        return np.float32(mean) + np.float32(spread) * numbers

    return PlannedTensor(f"{name}.{part}", (size,), "F32", load)


def _source(seed: int, name: str) -> np.random.Generator:
    # Seeded by name too, so that a tensor does not depend on which were drawn before it.
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
