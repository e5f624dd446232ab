"""A tree of an EAGLE head's best tokens as one graph: the pairs accepted last, then all depths.

What `pair_chain` does for chains, for trees (EAGLE-1's of a fixed shape, EAGLE-2's dynamic ones). A
row below another is the pair of its token with the state that was predicted at that other. It sees
what the row above it sees, and its own cell: its mask is a copy of that row's with one cell more,
made inside the graph, because in a dynamic tree only the graph knows which row is above.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.ggml import F32, I32, I64, Graph, GraphBuilder
from specrun.runtime.drafters.eagle.pair_chain import fill_tokens
from specrun.runtime.heads.attention import KeyValueCache, Places, fill_chain, mask_below
from specrun.runtime.heads.graphs import chain_width
from specrun.runtime.heads.text_rows import RowPiece
from specrun.runtime.heads.tree_graphs import NamedChildren, TreeGraphs, TreePlan

if TYPE_CHECKING:
    from specrun.runtime.drafters.eagle.pair_head import PairHead

_OPERATIONS = 112  # of a graph for each depth, and for the pairs before it


class PairTrees:
    """The graphs of one conversation's trees over its cache. Close them before cache and head.

    Raises UnsupportedModelError where a drafted token may have no embedding, or the head knows
    fewer tokens than a row has children.
    """

    def __init__(self, head: PairHead, cache: KeyValueCache, plan: TreePlan) -> None:
        if max(plan.ranks) > head.sizes.vocab_size:
            raise UnsupportedModelError("a tree of more branches than an EAGLE head knows tokens")
        self._head, self._cache = head, cache
        self._ids = head.chain_ids()
        self._graphs = TreeGraphs(head.device, plan, self._build)
        # Of each row below the root: its depth, and the places of its mask in its depth's.
        self._steps = plan.row_depths[1:].astype(np.int32)
        self._in_depth = np.concatenate([np.arange(n) for n in plan.widths])[1:]
        self._numbers = np.arange(plan.n_drafted)
        self._own = 0, self._numbers

    def run(self, piece: RowPiece) -> NamedChildren:
        """Return the children below m real pairs, a piece's tokens [m] and rows [m, features].

        The rows of the tree go into the cells after theirs. Raises UnsupportedModelError where no
        backend computes the graph.
        """
        tokens, features, position, count = piece.tokens, piece.rows, piece.position, piece.count
        m = len(tokens)
        width, first = chain_width(m), count + m
        length = self._cache.length(first + len(self._steps))
        graph = self._graphs.get(length, (width,))
        inputs = graph.inputs
        fill_chain(graph, features, position, count, self._cache.spare, 0)
        if width == 1:
            graph.cells["tokens"][0] = tokens[0]
        else:
            fill_tokens(graph, tokens)
        if len(self._steps):
            # The root's row stands at position + m - 1.
            np.add(self._steps, position + m - 1, out=inputs["row_positions"][0])
            np.add(self._numbers, first, out=inputs["row_cells"][0])
            np.add(self._own_places(length), first, out=inputs["own"][0])
        return self._graphs.run(graph)

    def _own_places(self, length: int) -> npt.NDArray[np.int64]:
        """Return where each row's own cell is in its depth's mask, for rows in the first cells."""
        if self._own[0] != length:
            self._own = length, self._in_depth * length + self._numbers
        return self._own[1]

    def close(self) -> None:
        """Free graphs and table."""
        self._graphs.close()

    def _build(self, length: int, width: int) -> Graph:
        head, trees, plan = self._head, self._graphs, self._graphs.plan
        with closing(GraphBuilder(head.device, _OPERATIONS * (len(plan.widths) + 1))) as builder:
            places = self._cache.places(builder, width, length)
            features = builder.input("rows", F32, head.sizes.features, width)
            embedded = builder.get_rows(head.embedding, builder.input("tokens", I32, width))
            state, read = head.predicted(builder, embedded, head.fused(builder, features), places)
            mask = places.mask
            if width > 1:  # the draft goes on from the last real pair: not from rows that fill up
                last = builder.input("last", I32, 1)
                same, state = read is state, builder.get_rows(state, last)
                read = state if same else builder.get_rows(read, last)
                mask = builder.get_rows(mask, last)
            if plan.n_drafted:
                positions = builder.input("row_positions", I32, plan.n_drafted)
                cells = builder.input("row_cells", I64, plan.n_drafted)
                own = builder.input("own", I64, plan.n_drafted)
            rows = None
            for depth in range(len(plan.widths)):
                logits = builder.mul_mat(head.output, read)
                above = None if rows is None else rows.values
                rows = trees.add(builder, logits, depth, above, self._ids)
                if rows is None:
                    break
                here, n = trees.new_rows(depth + 1), plan.widths[depth + 1]
                zeros = trees.zeros(builder, n)
                mask = mask_below(
                    builder, mask, rows.parents, builder.columns(own, here.start, n), zeros
                )
                place = Places(
                    self._cache,
                    builder.columns(positions, here.start, n),
                    builder.columns(cells, here.start, n),
                    mask,
                )
                embedded = builder.get_rows(head.embedding, rows.tokens)
                above_states = builder.get_rows(state, rows.parents)
                state, read = head.predicted(builder, embedded, above_states, place)
            trees.output(builder)
            return builder.build()
