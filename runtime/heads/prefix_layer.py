"""Hydra++'s prefix layer (Ankner et al. 2024, section 4.3): one Llama layer over the target's final hidden states.

What it makes of position j, from the hidden states up to j, takes the place of the target's own hidden state as the
heads' input. It is a whole one-layer Llama without embeddings: x + attention(norm(x)), x + mlp(norm(x)), norm.
Only committed text passes through it, so its cache has no branches.

Tensors: `hydra.prefix.attn_norm.weight`, those of `decoder_layer` after `hydra.prefix.`, and
`hydra.prefix.output_norm.weight`.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32
from specrun.bindings.ggml.graph import Graph, GraphBuilder
from specrun.bindings.ggml.weights import TensorStore
from specrun.runtime.heads.decoder_layer import (
    LayerSizes,
    LayerWeights,
    attention,
    feed_forward,
    layer_sizes,
    layer_tensor_names,
)
from specrun.runtime.heads.graph_sizes import filled_length, filled_width
from specrun.runtime.heads.head_file import HeadFile

__all__ = ["PrefixLayer", "prefix_tensor_names"]

FloatRows = npt.NDArray[np.float32]

_PREFIX = "hydra.prefix."


class PrefixLayer:
    """The layer with room for `n_cells` positions. Its weights are the head's: `close()` it before them."""

    def __init__(self, sizes: LayerSizes, weights: TensorStore, device: ComputeDevice, *, n_cells: int) -> None:
        self.n_cells = filled_length(n_cells)
        self.native_seconds = 0.0
        self._sizes = sizes
        self._weights = LayerWeights(weights, _PREFIX)
        self._device = device
        self._graphs: dict[int, Graph] = {}
        self._length = 0  # of all graphs: a text that has outgrown one does not come back to it soon
        # The last cell takes what rows write that only fill up a graph.
        shape = ("F32", (sizes.kv_size, self.n_cells + 1))
        self._cache = TensorStore(device, {"keys": shape, "values": shape})

    def evaluate(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """Return the layer's output [n, hidden] for the hidden states [n, hidden] of positions `position` on.

        Their keys and values follow the `count` that are in the cache: all of these are seen, and none after them.
        """
        n = len(states)
        if n < 1 or count + n > self.n_cells:
            raise OptionError(f"a prefix layer with {self.n_cells} cells cannot hold {count + n} positions")
        width, length = filled_width(n), filled_length(count + n)
        rows = np.zeros((width, self._sizes.hidden), np.float32)
        rows[:n] = states
        places = np.arange(width)
        inputs = {
            "states": rows,
            "positions": (position + places).astype(np.int32),
            "cells": np.where(places < n, count + places, self.n_cells),
            "mask": np.where(np.arange(length) <= (count + places)[:, None], np.float32(0.0), np.float32("-inf")),
        }
        graph = self._graph(width, length)
        started = time.perf_counter()
        found = graph.run(inputs)
        self.native_seconds += time.perf_counter() - started
        return found["output"][:n].astype(np.float32, copy=False)

    def close(self) -> None:
        """Free graphs and cache."""
        self._close_graphs()
        self._cache.close()

    def _close_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()

    def _graph(self, n: int, length: int) -> Graph:
        if length != self._length:
            self._close_graphs()
            self._length = length
        if n not in self._graphs:
            self._graphs[n] = self._build(n, length)
        return self._graphs[n]

    def _build(self, n: int, length: int) -> Graph:
        sizes, weights, builder = self._sizes, self._weights, GraphBuilder(self._device)
        try:
            x = builder.input("states", F32, sizes.hidden, n)
            normed = builder.rms_norm(x, weights["attn_norm.weight"], sizes.norm_eps)
            x = builder.add(x, attention(builder, normed, weights, self._cache, sizes, length))
            x = builder.add(x, feed_forward(builder, x, weights, sizes))
            builder.output("output", builder.rms_norm(x, weights["output_norm.weight"], sizes.norm_eps))
            return builder.build()
        finally:
            builder.close()


def prefix_tensor_names(file: HeadFile) -> tuple[LayerSizes, list[str]]:
    """Return the layer's sizes and its tensors in a head's file, checked."""
    sizes = layer_sizes(file)
    norms = [file.require(f"{_PREFIX}{name}.weight", (sizes.hidden,)) for name in ("attn_norm", "output_norm")]
    return sizes, norms + layer_tensor_names(file, _PREFIX, sizes)
