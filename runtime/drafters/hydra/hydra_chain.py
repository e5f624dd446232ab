"""A greedy chain of Hydra's heads as one graph: the last states, then head by head.

With a prefix layer the states that came last pass through it first. Head k reads the state and the
embeddings of the tokens before its own, so each best token's embedding is appended to what the next
head reads, inside the graph.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from specrun.bindings.ggml import F32, I32, Graph, GraphBuilder
from specrun.runtime.drafters.hydra.prefix_layer import PrefixCells
from specrun.runtime.heads import ChainGraphs, ChainTokens, FloatRows, chain_width

if TYPE_CHECKING:
    from specrun.runtime.drafters.hydra.hydra_head import HydraHead

_PREFIX_OPERATIONS, _HEAD_OPERATIONS, _BLOCK_OPERATIONS = 96, 32, 8


class HydraChains:
    """The graphs of one conversation's chains. Close them before its prefix cells and the head."""

    def __init__(self, head: HydraHead, prefix: PrefixCells | None) -> None:
        self._head, self._prefix = head, prefix
        self._graphs = ChainGraphs(head.device, self._build)

    def run(
        self,
        states: FloatRows,
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
            # Cells are counted by the prefix layer alone: drafts never enter it.
            length = self._prefix.length(count + m)
            graph = self._graphs.get(length, chain_width(m), n, probabilities)
            self._prefix.fill(graph.inputs, states, position, count)
            if "last" in graph.inputs:
                # The heads read the last real row, not one that only fills the graph.
                graph.inputs["last"][...] = m - 1
        if "token" in graph.inputs:
            graph.inputs["token"][...] = token
        return self._graphs.run(graph, probabilities=probabilities)

    def close(self) -> None:
        """Free graphs and table."""
        self._graphs.close()

    def _build(self, length: int, width: int, n: int, probabilities: bool) -> Graph:
        heads = self._head
        per_head = _HEAD_OPERATIONS + _BLOCK_OPERATIONS * heads.n_blocks
        with closing(GraphBuilder(heads.device, _PREFIX_OPERATIONS + n * per_head)) as builder:
            if self._prefix is None:
                x = builder.input("states", F32, heads.hidden, 1)
            else:
                x = self._prefix.add(builder, width, length)
                if width > 1:
                    x = builder.get_rows(x, builder.input("last", I32, 1))
            token = None if heads.embedding is None else builder.input("token", I32, 1)
            for head in range(n):
                # Each head reads one embedding more than the one before it.
                if heads.embedding is not None and token is not None:
                    x = builder.concat(x, builder.get_rows(heads.embedding, token))
                logits = heads.logits(builder, head, x)
                best = self._graphs.add(builder, logits, head, probabilities=probabilities)
                token = builder.reshape(best, 1, 1)
            self._graphs.output(builder, n, probabilities=probabilities)
            return builder.build()
