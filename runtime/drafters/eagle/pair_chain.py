"""A greedy chain of a head over pairs as one graph: the pairs that were accepted last, then all
depths of the draft.

Depth by depth, a round costs an evaluation, its inputs and its outputs for every token. Here the
best token of a depth and the state predicted with it are the next pair inside the graph, and only
tokens come back. Each depth writes its key and value into the cell after the last one and reads the
cache from that write on, so it sees the depths above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml import F32, I32, ComputeDevice, Graph, GraphBuilder, Tensor
from specrun.runtime.heads import (
    ChainGraphs,
    ChainTokens,
    KeyValueCache,
    Places,
    chain_width,
    fill_chain_places,
)

_OPERATIONS = 96  # of a graph for each depth, and for the pairs before it


@dataclass(frozen=True, slots=True)
class PairGraphParts:
    """What a head's graph is made of: how features become states, and what a head predicts from
    tokens and states.

    `target_ids` are the target's tokens by the head's, I32 (1, vocab), where these differ.
    """

    n_features: int
    embedding: Tensor
    output: Tensor
    target_ids: Tensor | None
    fused: Callable[[GraphBuilder, Tensor], Tensor]
    predicted: Callable[[GraphBuilder, Tensor, Tensor, Places], tuple[Tensor, Tensor]]


class PairChains:
    """The graphs of one conversation's chains over its cache. Close them before the cache and the
    head."""

    def __init__(self, device: ComputeDevice, cache: KeyValueCache, parts: PairGraphParts) -> None:
        self._device = device
        self._cache = cache
        self._parts = parts
        self._graphs = ChainGraphs(device, self._build)

    def run(
        self,
        tokens: Sequence[int],
        features: npt.NDArray[np.float32],
        position: int,
        count: int,
        n: int,
        *,
        probabilities: bool,
    ) -> ChainTokens:
        """Return n tokens after m real pairs, [m] tokens and [m, features], in the cells after the
        first `count`.

        Raises UnsupportedModelError where no backend computes the graph.
        """
        m = len(tokens)
        width, length = chain_width(m), self._cache.length(count + m + n - 1)
        graph = self._graphs.get(length, width, n, probabilities)
        inputs = graph.inputs
        fill_chain_places(inputs, position, count, m, self._cache.spare, n - 1)
        inputs["features"][:m], inputs["tokens"][0, :m] = features, tokens
        if width > m:
            inputs["features"][m:], inputs["tokens"][0, m:] = 0.0, 0
        if width > 1:
            inputs["last"][...] = m - 1
        return self._graphs.run(graph, probabilities=probabilities)

    def close(self) -> None:
        """Free graphs and table."""
        self._graphs.close()

    def _build(self, length: int, width: int, n: int, probabilities: bool) -> Graph:
        parts, builder = self._parts, GraphBuilder(self._device, _OPERATIONS * (n + 1))
        try:
            places = self._cache.places(builder, width + n - 1, length)
            states = parts.fused(builder, builder.input("features", F32, parts.n_features, width))
            embedded = builder.get_rows(parts.embedding, builder.input("tokens", I32, width))
            state, read = parts.predicted(builder, embedded, states, places.part(builder, 0, width))
            if width > 1:
                last = builder.input("last", I32, 1)
                same, state = read is state, builder.get_rows(state, last)
                read = state if same else builder.get_rows(read, last)
            for depth in range(n):
                logits = builder.mul_mat(parts.output, read)
                token = self._graphs.table.add(
                    builder, logits, depth, ids=parts.target_ids, probabilities=probabilities
                )
                if depth < n - 1:
                    embedded = builder.get_rows(parts.embedding, builder.reshape(token, 1, 1))
                    place = places.part(builder, width + depth, 1)
                    state, read = parts.predicted(builder, embedded, state, place)
            self._graphs.table.output(builder, n, probabilities=probabilities)
            return builder.build()
        finally:
            builder.close()
