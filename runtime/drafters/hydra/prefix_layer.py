"""Hydra++'s prefix layer (Ankner et al. 2024, section 4.3): one Llama layer over hidden states.

What it makes of position j, from the hidden states up to j, takes the place of the target's own
hidden state as the heads' input. It is a whole one-layer Llama without embeddings: x +
attention(norm(x)), x + mlp(norm(x)), norm. Only committed text passes through it, so its cache has
no branches. The layer is weights, and every conversation has cells of its own
(`PrefixLayer.cells`).

Tensors: `hydra.prefix.attn_norm.weight`, those of `decoder_layer` after `hydra.prefix.`, and
`hydra.prefix.output_norm.weight`.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml import F32, ComputeDevice, Graph, GraphBuilder, Tensor, TensorStore
from specrun.runtime.heads.attention import (
    AttentionSizes,
    KeyValueCache,
    LayerWeights,
    decoder_layer,
    fill_chain,
    layer_attention,
    layer_tensor_names,
)
from specrun.runtime.heads.graphs import LengthGraphs, filled_width
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.heads.text_rows import FloatRows

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
    names = layer_tensor_names(file, _PREFIX, attention)
    for norm in ("attn_norm", "output_norm"):
        names.append(file.require(f"{_PREFIX}{norm}.weight", (attention.size,)))
    return PrefixPlan(attention, file.number("attention.layer_norm_rms_epsilon", 1e-6), names)


class PrefixLayer:
    """The layer's weights, which the head owns: only the cells that it makes are to be closed."""

    def __init__(self, plan: PrefixPlan, weights: TensorStore, device: ComputeDevice) -> None:
        self.plan = plan
        self.weights = LayerWeights(weights, _PREFIX)
        self.device = device

    def cells(self, n_cells: int) -> PrefixCells:
        """Return room for `n_cells` positions of one conversation, none of them known."""
        return PrefixCells(self, n_cells)


class PrefixCells:
    """One conversation's positions in the layer: their keys and values, and the graphs over them.

    There is room for `n_cells`, which is what was asked for, rounded up; the keys of a position are
    `kv_size` numbers, its values as many. Close it before the head.
    """

    def __init__(self, layer: PrefixLayer, n_cells: int) -> None:
        self._layer = layer
        self._graphs = LengthGraphs(self._build)
        self._cache = KeyValueCache(layer.device, layer.plan.attention, n_cells)
        self.n_cells = self._cache.n_cells
        self.length = self._cache.length  # how many cells a graph reads that sees so many of them
        self.spare = self._cache.spare  # where rows go that only fill a graph up
        self.kv_size = layer.plan.attention.kv_size

    def evaluate(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """Return the layer's output for the hidden states of positions `position` on, [n, hidden].

        Their keys and values follow the `count` that are in the cache: all of these are seen, and
        none after them.
        """
        n, used = len(states), count + len(states)
        if n < 1 or used > self.n_cells:
            raise self.too_many(used)
        graph = self._graphs.get(self._cache.length(used), (filled_width(n),))
        fill_chain(graph, states, position, count, self.spare, 0)
        graph.compute()
        return graph.read("output")[:n].astype(np.float32, copy=False)

    def too_many(self, used: int) -> OptionError:
        """Return the error for more positions than there are cells."""
        return OptionError(f"a prefix layer with {self.n_cells} cells cannot hold {used} positions")

    def add(self, builder: GraphBuilder, n: int, length: int) -> Tensor:
        """Add the layer for n hidden states to a graph: return its output (hidden, n).

        The graph gets the inputs that `fill_chain` fills, and reads the first `length` cells.
        """
        plan, weights = self._layer.plan, self._layer.weights
        eps = plan.norm_eps
        x = builder.input("rows", F32, plan.attention.size, n)
        # The residual is the state itself, as in Llama's layers;
        # only attention reads the normed one.
        normed = builder.rms_norm(x, weights["attn_norm.weight"], eps)
        factors = weights.get("rope_freqs.weight")
        places = self._cache.places(builder, n, length)
        x = decoder_layer(builder, weights, normed, x, places, eps, factors)
        return builder.rms_norm(x, weights["output_norm.weight"], eps)

    def close(self) -> None:
        """Free graphs and cache."""
        self._graphs.close()
        self._cache.close()

    def _build(self, length: int, n: int) -> Graph:
        with closing(GraphBuilder(self._layer.device)) as builder:
            builder.output("output", self.add(builder, n, length))
            return builder.build()
