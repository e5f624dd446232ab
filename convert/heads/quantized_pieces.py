"""Quantizes a matrix as its numbers come, piece by piece: a piece need not end where a row does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.row_quantizer import quantize_rows

__all__ = ["quantized_pieces"]


def quantized_pieces(
    pieces: Iterable[npt.NDArray[Any]], width: int, type_name: str, *, n_threads: int = 0
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the blocks of rows of `width` float32 numbers that come flat, in order, and cut anywhere.

    Raises as `quantize_rows`; the numbers must make up whole rows.
    """
    rest = np.empty(0, np.float32)
    for piece in pieces:
        numbers = np.concatenate([rest, piece]) if rest.size else piece
        whole = numbers.size // width * width
        rest = numbers[whole:].copy()
        if whole:
            yield quantize_rows(numbers[:whole].reshape(-1, width), type_name, n_threads=n_threads)
