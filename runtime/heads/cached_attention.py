"""Attention over a key-value cache that a head keeps for itself, as part of a ggml graph.

The cache is a table of cells. A graph writes the keys and values of its rows into the cells it is told, then each row
attends to the cells its mask shows: that serves a prompt, a chain and a tree alike, wherever the rows lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32, I32, I64
from specrun.bindings.ggml.graph import GraphBuilder, Rope, Tensor
from specrun.bindings.ggml.weights import TensorStore

__all__ = ["AttentionSizes", "KeyValueCache", "cache_inputs"]

_STEP = 256  # attention reads the cache in steps of this size, so that few graphs serve all lengths
_MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Heads of an attention layer: `n_heads` of queries share `n_kv_heads` of keys and values."""

    n_heads: int
    n_kv_heads: int
    head_size: int
    rope: Rope

    @property
    def size(self) -> int:
        """Numbers of all heads of one row."""
        return self.n_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Numbers of one row's keys."""
        return self.n_kv_heads * self.head_size


class KeyValueCache:
    """Room for the keys and values of `n_cells` rows, rounded up, in F32. Close it before the device.

    One more cell, `spare`, is where rows write that only fill up a graph.
    """

    def __init__(self, device: ComputeDevice, sizes: AttentionSizes, n_cells: int) -> None:
        self.sizes = sizes
        self.n_cells = -(-n_cells // _STEP) * _STEP
        self.spare = self.n_cells
        shape = ("F32", (sizes.kv_size, self.n_cells + 1))
        self._tensors = TensorStore(device, {"keys": shape, "values": shape})

    def length(self, used: int) -> int:
        """Return how many cells a graph reads so that it sees the first `used` of them."""
        return -(-used // _STEP) * _STEP

    def attend(
        self,
        builder: GraphBuilder,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        length: int,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Return what the heads have mixed, (size, n), for n rows that attend to the first `length` cells.

        `query` is (size, n), `key` and `value` (kv_size, n), not rotated yet; `factors` divide the rope frequencies.
        The graph gets the inputs that `cache_inputs` makes.
        """
        sizes, d, n = self.sizes, self.sizes.head_size, query.shape[1]
        positions, cells = builder.input("positions", I32, n), builder.input("cells", I64, n)
        mask = builder.input("mask", F32, length, n)

        def rotated(rows: Tensor, heads: int) -> Tensor:
            return builder.rope(builder.reshape(rows, d, heads, n), positions, sizes.rope, factors)

        key = builder.reshape(rotated(key, sizes.n_kv_heads), sizes.kv_size, n)
        for name, rows in (("keys", key), ("values", value)):
            builder.keep(builder.set_rows(Tensor(self._tensors[name]), rows, cells))
        query = rotated(query, sizes.n_heads)
        keys, values = (
            builder.reshape(builder.first_rows(Tensor(self._tensors[name]), length), d, sizes.n_kv_heads, length)
            for name in ("keys", "values")
        )
        scores = builder.mul_mat(builder.permute(keys, 0, 2, 1, 3), builder.permute(query, 0, 2, 1, 3))
        weights = builder.soft_max(scores, mask, 1.0 / math.sqrt(d))
        by_cell = builder.contiguous(builder.permute(values, 1, 2, 0, 3))
        mixed = builder.permute(builder.mul_mat(by_cell, weights), 0, 2, 1, 3)
        return builder.reshape(builder.contiguous(mixed), sizes.size, n)

    def close(self) -> None:
        """Free the cells."""
        self._tensors.close()


def cache_inputs(
    positions: npt.NDArray[np.int32],
    cells: npt.NDArray[np.int64],
    sees: npt.NDArray[np.bool_],
    width: int,
    length: int,
    spare: int,
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the inputs of an attention graph of `width` rows: the real ones, then rows that only fill it up.

    Those write to the spare cell and see the first one. `sees` is [n, cells in use].
    """
    n, used = sees.shape
    mask = np.full((width, length), _MASKED, np.float32)
    mask[:n, :used][sees] = 0.0
    mask[n:, 0] = 0.0
    more = width - n
    return {
        "positions": np.concatenate([positions, np.zeros(more, np.int32)]),
        "cells": np.concatenate([cells, np.full(more, spare, np.int64)]),
        "mask": mask,
    }
