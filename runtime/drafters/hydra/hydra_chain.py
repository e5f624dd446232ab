"""Chains and trees of Hydra's best tokens as one graph: the last states, then head by head.

With a prefix layer the states that came last pass through it first. Head k reads the state and the
embeddings of the tokens before its own, so each best token's embedding is appended to what the next
head reads, inside the graph. In a tree, every row of a head is one path.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, TypeVarTuple

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.ggml import F32, I32, Graph, GraphBuilder, Tensor
from specrun.runtime.drafters.hydra.prefix_layer import PrefixCells
from specrun.runtime.heads.attention import fill_chain
from specrun.runtime.heads.graphs import ChainGraphs, ChainTokens, LengthGraphs, chain_width
from specrun.runtime.heads.text_rows import RowPiece
from specrun.runtime.heads.tree_graphs import NamedChildren, TreeGraphs, TreePlan

if TYPE_CHECKING:
    from specrun.runtime.drafters.hydra.hydra_head import HydraHead

Key = TypeVarTuple("Key")
_PREFIX_OPERATIONS, _HEAD_OPERATIONS, _BLOCK_OPERATIONS = 96, 56, 8


class _LastState:
    """The state that the heads read, as a part of their graphs: of the last of some positions."""

    def __init__(self, head: HydraHead, prefix: PrefixCells | None) -> None:
        self._head, self._prefix = head, prefix

    def add(self, builder: GraphBuilder, length: int, width: int) -> Tensor:
        """Add it to a graph of this size; return it, (hidden, 1)."""
        if self._prefix is None:
            return builder.input("rows", F32, self._head.hidden, 1)
        x = self._prefix.add(builder, width, length)
        return builder.get_rows(x, builder.input("last", I32, 1)) if width > 1 else x

    def filled(self, graphs: LengthGraphs[int, *Key], piece: RowPiece, key: tuple[*Key]) -> Graph:
        """Return the graph for states of a text, filled with them, of those that a key tells apart.

        They are filled in as in `PrefixCells.evaluate`; without one, the last state alone.
        """
        prefix, states = self._prefix, piece.rows
        if prefix is None:
            graph = graphs.get(0, (1, *key))
            graph.inputs["rows"][0] = states[-1]
            return graph
        n, count = len(states), piece.count
        # Cells are counted by the prefix layer alone: drafts never enter it.
        graph = graphs.get(prefix.length(count + n), (chain_width(n), *key))
        fill_chain(graph, states, piece.position, count, prefix.spare, 0)
        if "last" in graph.inputs:
            # The heads read the last real row, not one that only fills the graph.
            graph.cells["last"][0] = n - 1
        return graph


def _n_operations(head: HydraHead, n: int) -> int:
    return _PREFIX_OPERATIONS + n * (_HEAD_OPERATIONS + _BLOCK_OPERATIONS * head.n_blocks)


class HydraChains:
    """The graphs of one conversation's chains. Close them before its prefix cells and the head."""

    def __init__(self, head: HydraHead, prefix: PrefixCells | None) -> None:
        self._head, self._state = head, _LastState(head, prefix)
        self._graphs = ChainGraphs(head.device, self._build)

    def run(self, given: tuple[RowPiece, int, int, bool]) -> ChainTokens:
        """Return n tokens after a token, below the last of a piece's hidden states [m, hidden].

        Given are the piece, the token, n, and whether probabilities are wanted. Raises
        UnsupportedModelError where no backend computes the graph.
        """
        piece, token, n, probabilities = given
        graph = self._state.filled(self._graphs, piece, (n, probabilities))
        if "token" in graph.inputs:
            graph.cells["token"][0] = token
        return self._graphs.run(graph, probabilities=probabilities)

    def close(self) -> None:
        """Free graphs and table."""
        self._graphs.close()

    def _build(self, length: int, width: int, n: int, probabilities: bool) -> Graph:
        heads = self._head
        with closing(GraphBuilder(heads.device, _n_operations(heads, n))) as builder:
            x = self._state.add(builder, length, width)
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


class HydraTrees:
    """The graphs of one conversation's trees of a plan. Close them as chains.

    Raises UnsupportedModelError for heads that are not grounded, which say the same after every
    path and need one row of each, and for trees of more branches than there are tokens.
    """

    def __init__(self, head: HydraHead, prefix: PrefixCells | None, plan: TreePlan) -> None:
        if head.embedding is None or max(plan.ranks) > head.vocab_size:
            raise UnsupportedModelError("these Hydra heads have no such tree in one graph")
        self._head, self._state = head, _LastState(head, prefix)
        self._embedding = head.embedding
        self._graphs = TreeGraphs(head.device, plan, self._build)

    def run(self, given: tuple[RowPiece, int]) -> NamedChildren:
        """Return the children after a token, below the last of a piece's hidden states [m, hidden].

        Raises UnsupportedModelError where no backend computes the graph.
        """
        piece, token = given
        graph = self._state.filled(self._graphs, piece, ())
        graph.cells["token"][0] = token
        return self._graphs.run(graph)

    def close(self) -> None:
        """Free graphs and table."""
        self._graphs.close()

    def _build(self, length: int, width: int) -> Graph:
        heads, n = self._head, len(self._graphs.plan.widths)
        with closing(GraphBuilder(heads.device, _n_operations(heads, n))) as builder:
            x = self._state.add(builder, length, width)
            x = builder.concat(x, builder.get_rows(self._embedding, builder.input("token", I32, 1)))
            rows = None
            for depth in range(n):
                above = None if rows is None else rows.values
                rows = self._graphs.add(builder, heads.logits(builder, depth, x), depth, above)
                if rows is None:
                    break
                # A path is its parent's, and one token more.
                paths = builder.get_rows(x, rows.parents)
                x = builder.concat(paths, builder.get_rows(self._embedding, rows.tokens))
            self._graphs.output(builder)
            return builder.build()
