"""Hydra++'s prefix layer (Ankner et al. 2024, section 4.3): one Llama layer over the target's final hidden states.

What it makes of position j, from the hidden states up to j, takes the place of the target's own hidden state as the
heads' input. It is a whole one-layer Llama without embeddings: x + attention(norm(x)), x + mlp(norm(x)), norm.
Only committed text passes through it, so its cache has no branches.

Tensors: `hydra.prefix.attn_norm.weight`, those of `decoder_layer` after `hydra.prefix.`, and
`hydra.prefix.output_norm.weight`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32
from specrun.bindings.ggml.graph import Graph, GraphBuilder
from specrun.bindings.ggml.weights import TensorStore
from specrun.runtime.heads.cached_attention import AttentionSizes, KeyValueCache, cache_inputs
from specrun.runtime.heads.decoder_layer import LayerWeights, decoder_layer, layer_attention, layer_tensor_names
from specrun.runtime.heads.graph_sizes import filled_width
from specrun.runtime.heads.head_file import HeadFile

__all__ = ["PrefixLayer", "PrefixPlan", "plan_prefix"]

FloatRows = npt.NDArray[np.float32]

_PREFIX = "hydra.prefix."


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What a head's file says of its prefix layer: sizes, and the names of its tensors."""

    attention: AttentionSizes
    norm_eps: float
    names: list[str]


def plan_prefix(file: HeadFile) -> PrefixPlan:
    """Read and check what a file says; raises MalformedFileError."""
    attention = layer_attention(file)
    norms = [file.require(f"{_PREFIX}{name}.weight", (attention.size,)) for name in ("attn_norm", "output_norm")]
    names = norms + layer_tensor_names(file, _PREFIX, attention)
    return PrefixPlan(attention, file.number("attention.layer_norm_rms_epsilon", 1e-6), names)


class PrefixLayer:
    """The layer with room for `n_cells` positions. Its weights are the head's: `close()` it before them."""

    def __init__(self, plan: PrefixPlan, weights: TensorStore, device: ComputeDevice, *, n_cells: int) -> None:
        self.native_seconds = 0.0
        self._plan = plan
        self._weights = LayerWeights(weights, _PREFIX)
        self._device = device
        self._graphs: dict[int, Graph] = {}
        self._length = 0  # of all graphs: a text that has outgrown one does not come back to it soon
        self._cache = KeyValueCache(device, plan.attention, n_cells)
        self.n_cells = self._cache.n_cells

    def evaluate(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """Return the layer's output [n, hidden] for the hidden states [n, hidden] of positions `position` on.

        Their keys and values follow the `count` that are in the cache: all of these are seen, and none after them.
        """
        n, used = len(states), count + len(states)
        if n < 1 or used > self.n_cells:
            raise OptionError(f"a prefix layer with {self.n_cells} cells cannot hold {used} positions")
        width, length = filled_width(n), self._cache.length(used)
        rows = np.zeros((width, states.shape[1]), np.float32)
        rows[:n] = states
        positions = np.arange(position, position + n, dtype=np.int32)
        sees = np.tri(n, used, count, dtype=np.bool_)
        cells = np.arange(count, used, dtype=np.int64)
        inputs = cache_inputs(positions, cells, sees, width, length, self._cache.spare) | {"states": rows}
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
        eps, weights, builder = self._plan.norm_eps, self._weights, GraphBuilder(self._device)
        try:
            x = builder.input("states", F32, self._plan.attention.size, n)
            normed = builder.rms_norm(x, weights["attn_norm.weight"], eps)
            factors = weights.get("rope_freqs.weight")
            x = decoder_layer(builder, weights, self._cache, normed, x, length, eps, factors)
            builder.output("output", builder.rms_norm(x, weights["output_norm.weight"], eps))
            return builder.build()
        finally:
            builder.close()
