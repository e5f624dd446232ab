"""A ggml tensor (ggml_tensor): sizes, strides and type of a graph's node or a weight."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml.functions import F16, F32, I32, I64, fields

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
        """Whether elements lie in order without gaps; strides of sizes 1 say nothing."""
        shape, strides = self.shape, self.strides
        # Quantized types pack blocks of a row: only the dimensions above it tell.
        expected = strides[0] * shape[0] if self.type in DTYPES else strides[1]
        for size, stride in zip(shape[1:], strides[1:], strict=True):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True
