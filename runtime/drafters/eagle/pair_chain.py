"""A greedy chain of an EAGLE head as one graph: the pairs that were accepted last, then all depths.

Depth by depth, a round costs an evaluation, its inputs and its outputs for every token. Here the
best token of a depth and the state predicted with it are the next pair inside the graph, and only
tokens come back. Each depth writes its key and value into the cell after the last one and reads the
cache from that write on, so it sees the depths above it.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from specrun.bindings.ggml import F32, I32, Graph, GraphBuilder
from specrun.runtime.heads.attention import KeyValueCache, fill_chain
from specrun.runtime.heads.graphs import ChainGraphs, ChainTokens, chain_width
from specrun.runtime.heads.text_rows import RowPiece

if TYPE_CHECKING:
    from specrun.runtime.drafters.eagle.pair_head import PairHead

_OPERATIONS = 96  # of a graph for each depth, and for the pairs before it


class PairChains:
    """The graphs of one conversation's chains over its cache. Close them before cache and head.

    Raises UnsupportedModelError where a drafted token may have no embedding.
    """

    def __init__(self, head: PairHead, cache: KeyValueCache) -> None:
        self._head, self._cache = head, cache
        self._ids = head.chain_ids()
        self._graphs = ChainGraphs(head.device, self._build)

    def run(self, given: tuple[RowPiece, int, bool]) -> ChainTokens:
        """Return n tokens after m real pairs, a piece's tokens [m] and rows [m, features].

        Given are the piece, n, and whether probabilities are wanted. Raises UnsupportedModelError
        where no backend computes the graph.
        """
        piece, n, probabilities = given
        tokens, count = piece.tokens, piece.count
        m = len(tokens)
        # Of n tokens the last is not fed back: n - 1 draft pairs need cells and places.
        width, length = chain_width(m), self._cache.length(count + m + n - 1)
        graph = self._graphs.get(length, (width, n, probabilities))
        fill_chain(graph, piece.rows, piece.position, count, self._cache.spare, n - 1)
        if width == 1:
            graph.cells["tokens"][0] = tokens[0]
        else:
            fill_tokens(graph, tokens)
        return self._graphs.run(graph, probabilities=probabilities)

    def close(self) -> None:
        """Free graphs and table."""
        self._graphs.close()

    def _build(self, length: int, width: int, n: int, probabilities: bool) -> Graph:
        head = self._head
        with closing(GraphBuilder(head.device, _OPERATIONS * (n + 1))) as builder:
            places = self._cache.places(builder, width + n - 1, length)
            features = builder.input("rows", F32, head.sizes.features, width)
            embedded = builder.get_rows(head.embedding, builder.input("tokens", I32, width))
            first, states = places.part(builder, 0, width), head.fused(builder, features)
            state, read = head.predicted(builder, embedded, states, first)
            if width > 1:  # the draft goes on from the last real pair: not from rows that fill up
                last = builder.input("last", I32, 1)
                same, state = read is state, builder.get_rows(state, last)
                read = state if same else builder.get_rows(read, last)
            for depth in range(n):
                logits = builder.mul_mat(head.output, read)
                token = self._graphs.add(
                    builder, logits, depth, ids=self._ids, probabilities=probabilities
                )
                if depth < n - 1:
                    embedded = builder.get_rows(head.embedding, builder.reshape(token, 1, 1))
                    place = places.part(builder, width + depth, 1)
                    state, read = head.predicted(builder, embedded, state, place)
            self._graphs.output(builder, n, probabilities=probabilities)
            return builder.build()


def fill_tokens(graph: Graph, tokens: list[int]) -> None:
    """Fill a graph of several rows with the tokens of the real ones, and say which is the last."""
    given, m = graph.inputs["tokens"][0], len(tokens)
    given[:m], given[m:] = tokens, 0
    graph.cells["last"][0] = m - 1
