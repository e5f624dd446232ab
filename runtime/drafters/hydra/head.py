"""Hydra's heads (Ankner et al. 2024), their graphs, and Hydra++'s prefix layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.ggml import F32, I32, Graph, GraphBuilder, Tensor
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.residual_heads import ResidualHeads
from specrun.runtime.heads.file import HeadFile
from specrun.runtime.heads.graphs import (
    AttentionSizes,
    KeyValueCache,
    LengthGraphs,
    NativeShare,
    RankedTokens,
    add_ranking,
    chain_width,
    decoder_layer,
    fill_chain,
    filled_width,
    layer_attention,
    layer_tensor_names,
    ranked_tokens,
)
from specrun.runtime.heads.states import FloatRows, RowPiece
from specrun.runtime.heads.tree_graphs import (
    NamedChildren,
    NextRows,
    PlannedTrees,
    TreeGraphs,
    TreePlan,
)

# == Hydra++'s prefix layer (section 4.3): one Llama layer over hidden states ======================
#
# Its result at position j, from the hidden states up to j, takes the place of the target's own
# hidden state as the heads' input. It is a whole one-layer Llama without embeddings: x +
# attention(norm(x)), x + mlp(norm(x)), norm. Only committed text passes through it, so its cache
# has no branches.
#
# Tensors: `hydra.prefix.attn_norm.weight`, those of `decoder_layer` after `hydra.prefix.`, and
# `hydra.prefix.output_norm.weight`.


_PREFIX = "hydra.prefix."


@dataclass(frozen=True, slots=True)
class PrefixLayer:
    """A head file's facts of its prefix layer: sizes, and the names of its tensors."""

    attention: AttentionSizes
    norm_eps: float
    names: list[str]

    @staticmethod
    def read(file: HeadFile) -> PrefixLayer | None:
        """Return the facts of a file, checked, None without such a layer."""
        if not file.flag("prefix_layer"):
            return None
        attention = layer_attention(file)
        h = attention.size
        names = layer_tensor_names(file, _PREFIX, attention, hidden=h, reads=h)
        for norm in ("attn_norm", "output_norm"):
            names.append(file.require(f"{_PREFIX}{norm}.weight", (h,)))
        return PrefixLayer(attention, file.number("attention.layer_norm_rms_epsilon", 1e-6), names)


class PrefixCells:
    """One conversation's positions in a head's layer: keys and values, and the graphs over them.

    There is room for `n_cells`, the requested number, rounded up. Close it before the head.
    """

    def __init__(self, head: HydraHead, layer: PrefixLayer, n_cells: int) -> None:
        self._head, self._layer = head, layer
        self._graphs = LengthGraphs(self._build)
        self._cache = KeyValueCache(head.device, layer.attention, n_cells)
        self.n_cells = self._cache.n_cells
        self.length = self._cache.length  # how many cells a graph reads that sees so many of them
        self.spare = self._cache.spare  # where rows go that only fill a graph up

    def evaluate(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """Return the layer's output for the hidden states of positions `position` on, [n, hidden].

        Their keys and values follow the `count` that are in the cache: all of these are seen, and
        none after them.
        """
        n, used = len(states), count + len(states)
        self.check(used)
        graph = self._graphs.get(self._cache.length(used), filled_width(n))
        fill_chain(graph, states, position, count, self.spare)
        graph.compute()
        return graph.read("output")[:n].astype(np.float32, copy=False)

    def check(self, used: int) -> None:
        """Raise `OptionError` for more positions than there are cells."""
        if used > self.n_cells:
            has = f"a prefix layer with {self.n_cells} cells"
            raise OptionError(f"{has} cannot hold {used} positions")

    def add(self, builder: GraphBuilder, n: int, length: int) -> Tensor:
        """Add the layer for n hidden states to a graph: return its output (hidden, n).

        The graph gets the inputs that `fill_chain` fills, and reads the first `length` cells.
        """
        weights, eps = self._head.tensors(_PREFIX), self._layer.norm_eps
        x = builder.input("rows", F32, self._layer.attention.size, n)
        # The residual is the state itself, as in Llama's layers;
        # only attention reads the normed one.
        normed = builder.rms_norm(x, weights["attn_norm.weight"], eps)
        factors = weights.get("rope_freqs.weight")
        places = self._cache.places(builder, n, length)
        x = decoder_layer(builder, weights, normed, x, places, eps, factors)
        return builder.rms_norm(x, weights["output_norm.weight"], eps)

    def copy(self, other: PrefixCells, n: int) -> None:
        """Copy the first n positions of another conversation."""
        self._cache.copy(other._cache, n)

    def close(self) -> None:
        """Free graphs and cache."""
        self._graphs.close()
        self._cache.close()

    def _build(self, length: int, n: int) -> Graph:
        with closing(GraphBuilder(self._head.device)) as builder:
            builder.output("output", self.add(builder, n, length))
            return builder.build()


# == A tree of best tokens as one graph: the last states, then head by head ========================
#
# With a prefix layer the states that came last pass through it first. Head k reads the state and
# the embeddings of the tokens before its own, so each best token's embedding is appended to the
# next head's inputs, inside the graph. In a tree, every row of a head is one path.


_PREFIX_OPERATIONS, _HEAD_OPERATIONS, _BLOCK_OPERATIONS = 96, 56, 8


class HydraTrees(TreeGraphs):
    """The graphs of one conversation's trees of a plan. Close them before cells and head.

    Raises UnsupportedModelError for trees of heads that are not grounded, which return the same
    after every path and need one row of each, for trees of more branches than tokens, and if a
    drafted token, which is fed on unchecked, may have no embedding.
    """

    def __init__(self, head: HydraHead, prefix: PrefixCells | None, plan: TreePlan) -> None:
        branches, embedding = max(plan.widths) > 1, head.embedding
        if (embedding is None and branches) or max(plan.ranks) > head.vocab_size:
            raise UnsupportedModelError("these Hydra heads have no such tree in one graph")
        if embedding is not None and embedding.shape[1] < head.vocab_size:
            raise UnsupportedModelError(f"tokens from {embedding.shape[1]} on have no embedding")
        self._head, self._prefix = head, prefix
        super().__init__(head.device, plan, self._made)

    def run(self, piece: RowPiece, last: int) -> NamedChildren:
        """Return the children after a token, below the last of a piece's hidden states."""
        prefix, states, n, count = self._prefix, piece.rows, len(piece), piece.count
        if prefix is None:
            graph = self.get(0, 1)
            graph.inputs["rows"][0] = states[-1]
        else:
            # Cells are counted by the prefix layer alone: drafts never enter it.
            graph = self.get(prefix.length(count + n), chain_width(n))
            fill_chain(graph, states, piece.position, count, prefix.spare)
            if "last" in graph.inputs:
                # The heads read the last real row, not one that only fills the graph.
                graph.cells["last"][0] = n - 1
        if "token" in graph.inputs:
            graph.cells["token"][0] = last
        return self.named(graph)

    def _made(self, length: int, width: int) -> Graph:
        head, prefix, embedding = self._head, self._prefix, self._head.embedding
        operations = _HEAD_OPERATIONS + _BLOCK_OPERATIONS * head.n_blocks
        operations = _PREFIX_OPERATIONS + len(self.plan.widths) * operations
        with closing(GraphBuilder(head.device, operations)) as builder:
            if prefix is None:
                x = builder.input("rows", F32, head.hidden, 1)
            else:
                x = prefix.add(builder, width, length)
                if width > 1:
                    x = builder.get_rows(x, builder.input("last", I32, 1))
            if embedding is not None:
                token = builder.input("token", I32, 1)
                x = builder.concat(x, builder.get_rows(embedding, token))

            def below(depth: int, rows: NextRows) -> Tensor:
                nonlocal x
                if embedding is not None:
                    # A path is its parent's, and one token more.
                    paths = builder.get_rows(x, rows.parents)
                    x = builder.concat(paths, builder.get_rows(embedding, rows.tokens))
                return head.logits(builder, depth, x)

            return self.grow(builder, head.logits(builder, 0, x), below)


# == The heads =====================================================================================
#
# Head k predicts the token k + 2 places after the hidden state h of position t, given the tokens
# between, t+1 (the target's own) to t+1+k: x = [h; embed(t+1); ...; embed(t+1+k)], then residual
# blocks, then an output matrix. The first block makes x narrower, S x + c + SiLU(W x + b), later
# ones keep the width, x + SiLU(W x + b). Hydra++ puts the output of a prefix layer in the place of
# h. Heads that are not grounded read h alone, as Medusa's. Without an output
# matrix of its own a head uses the target's. The embeddings are the target's.
#
# The heads are weights, loaded once; every conversation that drafts with them has cells of its own
# (`HydraHead.cells`).
#
# Tensors of head k: `hydra.{k}.res.{j}.weight` ((k + 2) h, h) for j = 0, else (h, h), and `.bias`
# (h); `hydra.{k}.skip.weight` ((k + 2) h, h) and `.bias` (h), the first block's S and c, of
# grounded heads only; `hydra.{k}.output.weight` (h, vocab, optional) and `.bias` (vocab, optional).
# The prefix layer: see above. Metadata: `hydra.embedding_length`, `.vocab_size`,
# `.head_count`, `.block_count`, `.grounded` (bool, true if absent), `.prefix_layer` (bool, false
# if absent), `.node_accuracy` (optional, see `heads.file`); for the prefix layer
# `.attention.head_count`, `.attention.head_count_kv`, `.feed_forward_length`, `.rope.freq_base`,
# `.rope.scaling.factor`, `.attention.layer_norm_rms_epsilon`.


Paths = Sequence[Sequence[int]]


class HydraHead(ResidualHeads):
    """The weights of a file's heads on the target's device. Close it between cells and target.

    `prefix` is the prefix layer if there is one: the heads then read its result. `ranks[k]` is
    how many tokens head k has to name; without it, `prepare` raises later. With `whole_rows` heads
    can return all logits.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        *,
        ranks: Sequence[int] | None = None,
        whole_rows: bool = False,
        n_threads: int = 0,
    ) -> None:
        file = HeadFile(path, "hydra")
        file.check_target(target)
        self.prefix, self.whole_rows = PrefixLayer.read(file), whole_rows
        self._grounded = file.flag("grounded", default=True)
        names = () if self.prefix is None else self.prefix.names
        super().__init__(file, target, n_threads, grounded=self._grounded, names=names)
        try:
            self.embedding = self._target.embedding() if self._grounded else None
            if ranks is not None:
                self.prepare(ranks)
        except BaseException:
            self.close()
            raise

    def cells(self, n_cells: int) -> HydraCells:
        """Return the parts of one conversation, with room for `n_cells` in the prefix layer."""
        return HydraCells(self, n_cells)

    def prepare(self, ranks: Sequence[int]) -> None:
        """Set how many tokens each head has to name; heads without an entry are left out."""
        self.check_depth(len(ranks))
        # Graphs name a fixed number of tokens, so other ranks need other graphs.
        self._close_graphs()
        self.ranks = tuple(min(rank, self.vocab_size) for rank in ranks)

    def best_laws(self, state: FloatRows, paths: Paths) -> RankedTokens:
        """Return the best tokens after each of n paths of one length, below a state.

        A path is the tokens from the target's own on; those of k + 1 tokens are head k's. The state
        is [hidden] for all paths or [n, hidden].
        """
        n, graph = self._evaluate(state, paths)
        best = ranked_tokens(graph, n)
        # Heads that are not grounded return the same after every path: the one row is repeated.
        if n == len(paths):
            return best
        return RankedTokens(best.tokens.repeat(len(paths), 0), best.log_probs.repeat(len(paths), 0))

    def rows(self, state: FloatRows, paths: Paths) -> tuple[RankedTokens, list[FloatRows]]:
        """Return the results of `best_laws`, and whole rows of logits, valid until the next."""
        laws = self.best_laws(state, paths)
        n = len(paths) if self._grounded or state.ndim > 1 else 1
        graph = self._graphs[len(paths[0]) - 1, filled_width(n)]
        whole = graph.peek("logits")[:n].astype(np.float32, copy=False)
        return laws, [whole[row % n] for row in range(len(paths))]

    def _evaluate(self, state: FloatRows, paths: Paths) -> tuple[int, Graph]:
        """Run the graph of a head; return it, and for how many of the paths it ran.

        Heads that are not grounded have the same results after all paths: one is enough.
        """
        head = len(paths[0]) - 1
        if not 0 <= head < len(self.ranks):
            most = len(self.ranks)
            raise OptionError(
                f"a path of {head + 1} tokens: these Hydra heads are prepared for {most}"
            )
        n = len(paths) if self._grounded or state.ndim > 1 else 1
        width = filled_width(n)
        key = head, width
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._build(head, width)
        states = graph.inputs["state"]
        # Rows that fill up are zeros and token 0: finite, and not read.
        states[:n], states[n:] = state, 0.0
        if self._grounded:
            known = self.vocab_size
            if not all(0 <= token < known for path in paths for token in path):
                # ggml would end the process.
                raise OptionError(
                    f"a path with a token outside the {known} tokens of these Hydra heads"
                )
            tokens = graph.inputs["tokens"].reshape(width, head + 1)
            tokens[:n], tokens[n:] = paths, 0
        graph.compute()
        return n, graph

    def _build(self, head: int, n: int) -> Graph:
        """Return the graph of a head for n paths."""
        with closing(GraphBuilder(self.device)) as builder:
            x = builder.input("state", F32, self.hidden, n)
            if self.embedding is not None:
                # The tokens lie path after path, so the embeddings of a path are one row already.
                tokens = builder.input("tokens", I32, n * (head + 1))
                embedded = builder.get_rows(self.embedding, tokens)
                x = builder.concat(x, builder.reshape(embedded, self.hidden * (head + 1), n))
            logits = self.logits(builder, head, x)
            add_ranking(builder, logits, self.ranks[head])
            if self.whole_rows:
                builder.output("logits", logits)
            return builder.build()


class HydraCells:
    """One conversation's positions in the prefix layer of Hydra's heads, and its trees' graphs.

    `prefix` are the cells of the prefix layer, None if there is none: the heads then read the
    target's hidden states. The heads' results depend on a state alone, so their own graphs are
    shared. Close it before them.
    """

    def __init__(self, head: HydraHead, n_cells: int) -> None:
        self.head = head
        self._native = NativeShare(head.device)
        layer = head.prefix
        self.prefix = prefix = None if layer is None else PrefixCells(head, layer, n_cells)
        self._trees = PlannedTrees(lambda plan: HydraTrees(head, prefix, plan), self._native)

    @property
    def native_seconds(self) -> float:
        """Time in graphs that this conversation ran."""
        return self._native.seconds

    def states(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """Return the heads' inputs for the hidden states of positions `position` on, [n, hidden].

        They are the results of `PrefixCells.evaluate`; without a prefix layer themselves.
        """
        if self.prefix is None:
            return states
        with self._native:
            return self.prefix.evaluate(states, position, count)

    def best_laws(self, state: FloatRows, paths: Paths) -> RankedTokens:
        """Return the best tokens after each path; see `HydraHead.best_laws`."""
        with self._native:
            return self.head.best_laws(state, paths)

    def rows(self, state: FloatRows, paths: Paths) -> tuple[RankedTokens, list[FloatRows]]:
        """Return distributions and whole rows; see `HydraHead.rows`."""
        with self._native:
            return self.head.rows(state, paths)

    def tree(self, plan: TreePlan, piece: RowPiece, last: int) -> NamedChildren | None:
        """Return views of the children of a plan's tree after a token and a piece's last state.

        Its rows are hidden states [m, hidden]. With a prefix layer all of them pass through it, as
        in `PrefixCells.evaluate`. None if one graph cannot do it.
        """
        head = self.head
        head.check_depth(len(plan.ranks))
        if not 0 <= last < head.vocab_size:  # ggml would end the process
            raise OptionError(f"a token outside the {head.vocab_size} tokens of these Hydra heads")
        if self.prefix is not None:
            self.prefix.check(piece.count + len(piece))
        return self._trees.draft(plan, piece, last)

    def copy(self, other: HydraCells, base: int, count: int) -> bool:
        """Copy the first positions of another conversation in the prefix layer; return True."""
        if self.prefix is not None and other.prefix is not None:
            self.prefix.copy(other.prefix, count)
        return True

    def close(self) -> None:
        """Free the graphs of whole drafts and the cells; calling it again does nothing."""
        self._trees.close()
        if self.prefix is not None:
            self.prefix.close()
