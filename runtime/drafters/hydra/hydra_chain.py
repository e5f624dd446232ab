"""A greedy chain of Hydra's heads as one graph: the states that came last through the prefix layer,
then head by head.

Head k reads the state and the embeddings of the tokens before its own, so each best token's
embedding is appended to what the next head reads, inside the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml import F32, I32, ComputeDevice, Graph, GraphBuilder, Tensor
from specrun.runtime.drafters.hydra.prefix_layer import PrefixCells
from specrun.runtime.heads import ChainGraphs, ChainTokens, chain_width

_PREFIX_OPERATIONS, _HEAD_OPERATIONS, _BLOCK_OPERATIONS = 96, 32, 8


@dataclass(frozen=True, slots=True)
class HydraGraphParts:
    """What the graph is made of: the sizes, the embeddings that grounded heads read, and a head's
    logits.

    `logits(builder, head, x)` are those of a head that reads x, (width, 1).
    """

    hidden: int
    n_blocks: int
    embedding: Tensor | None
    logits: Callable[[GraphBuilder, int, Tensor], Tensor]


class HydraChains:
    """The graphs of one conversation's chains. Close them before its prefix cells and the head."""

    def __init__(
        self, device: ComputeDevice, prefix: PrefixCells | None, parts: HydraGraphParts
    ) -> None:
        self._device = device
        self._prefix = prefix
        self._parts = parts
        self._graphs = ChainGraphs(device, self._build)

    def run(
        self,
        states: npt.NDArray[np.float32],
        position: int,
        count: int,
        token: int,
        n: int,
        *,
        probabilities: bool,
    ) -> ChainTokens:
        """Return n tokens after a token, below the last of the hidden states [m, hidden].

        Their places in the prefix layer are those of `PrefixCells.evaluate`; without one, the last
        state is read alone. Raises UnsupportedModelError where no backend computes the graph.
        """
        m = len(states)
        if self._prefix is None:
            graph = self._graphs.get(0, 1, n, probabilities)
            graph.inputs["states"][0] = states[-1]
        else:
            graph = self._graphs.get(
                self._prefix.length(count + m), chain_width(m), n, probabilities
            )
            self._prefix.fill(graph.inputs, states, position, count)
            if "last" in graph.inputs:
                graph.inputs["last"][...] = m - 1
        if "token" in graph.inputs:
            graph.inputs["token"][...] = token
        return self._graphs.run(graph, probabilities=probabilities)

    def close(self) -> None:
        """Free graphs and table."""
        self._graphs.close()

    def _build(self, length: int, width: int, n: int, probabilities: bool) -> Graph:
        parts = self._parts
        per_head = _HEAD_OPERATIONS + _BLOCK_OPERATIONS * parts.n_blocks
        builder = GraphBuilder(self._device, _PREFIX_OPERATIONS + n * per_head)
        try:
            if self._prefix is None:
                x = builder.input("states", F32, parts.hidden, 1)
            else:
                x = self._prefix.add(builder, width, length)
                if width > 1:
                    x = builder.get_rows(x, builder.input("last", I32, 1))
            token = None if parts.embedding is None else builder.input("token", I32, 1)
            for head in range(n):
                if parts.embedding is not None and token is not None:
                    x = builder.concat(x, builder.get_rows(parts.embedding, token))
                token = builder.reshape(
                    self._graphs.table.add(
                        builder, parts.logits(builder, head, x), head, probabilities=probabilities
                    ),
                    1,
                    1,
                )
            self._graphs.table.output(builder, n, probabilities=probabilities)
            return builder.build()
        finally:
            builder.close()
