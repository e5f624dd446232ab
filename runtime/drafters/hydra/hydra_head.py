"""Hydra's heads (Ankner et al. 2024, section 3) as ggml graphs: each reads the tokens before.

Head k predicts the token k + 2 places after the hidden state h of position t, given the tokens
between, t+1 (the target's own) to t+1+k: x = [h; embed(t+1); ...; embed(t+1+k)], then residual
blocks, then an output matrix. The first block makes x narrower, S x + c + SiLU(W x + b), later ones
keep the width, x + SiLU(W x + b). Hydra++ puts the output of a prefix layer in the place of h
(`prefix_layer`). Heads that are not grounded read h alone, as Medusa's. Without an output matrix of
its own a head uses the target's. The embeddings are the target's.

The heads are weights, loaded once; every conversation that drafts with them has cells of its own
(`HydraHead.cells`).

Tensors of head k: `hydra.{k}.res.{j}.weight` ((k + 2) h, h) for j = 0, else (h, h), and `.bias`
(h); `hydra.{k}.skip.weight` ((k + 2) h, h) and `.bias` (h), the first block's S and c, of grounded
heads only; `hydra.{k}.output.weight` (h, vocab, optional) and `.bias` (vocab, optional). The prefix
layer: see `prefix_layer`. Metadata: `hydra.embedding_length`, `.vocab_size`, `.head_count`,
`.block_count`, `.grounded` (bool, true where absent), `.prefix_layer` (bool, false where absent),
`.node_accuracy` (optional, see `node_accuracy`); for the prefix layer `.attention.head_count`,
`.attention.head_count_kv`, `.feed_forward_length`, `.rope.freq_base`, `.rope.scaling.factor`,
`.attention.layer_norm_rms_epsilon`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32, I32
from specrun.bindings.ggml.graph import GraphBuilder
from specrun.bindings.ggml.ready_graph import Graph
from specrun.bindings.ggml.target_tensors import TargetTensors, device_for_heads
from specrun.bindings.ggml.tensor import Tensor
from specrun.bindings.ggml.weights import TensorStore, load_tensors
from specrun.bindings.models.model import Model
from specrun.runtime.costs.memory_traffic import multiplied
from specrun.runtime.drafters.hydra.hydra_chain import HydraChains, HydraTrees
from specrun.runtime.drafters.hydra.prefix_layer import PrefixLayer, plan_prefix
from specrun.runtime.heads.graphs import (
    ChainTokens,
    NativeShare,
    PossibleGraphs,
    RankedTokens,
    add_ranking,
    filled_width,
    ranked_tokens,
    tokens_by_rank,
)
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.heads.node_accuracy import stored_accuracy
from specrun.runtime.heads.text_rows import FloatRows, RowPiece
from specrun.runtime.heads.tree_graphs import NamedChildren, PlannedTrees, TreePlan

_MAX_HEADS, _MAX_BLOCKS = 32, 16

Paths = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _HeadTensors:
    """The names of a head's tensors: (weight, bias) of each block, the skip and the output."""

    blocks: tuple[tuple[str, str], ...]
    skip: tuple[str, str] | None
    output: str | None
    output_bias: str | None

    @property
    def names(self) -> list[str]:
        """All of them."""
        pairs = [*self.blocks, self.skip or (), (self.output, self.output_bias)]
        return [name for pair in pairs for name in pair if name is not None]


class HydraHead:
    """The weights of a file's heads on the target's device. Close it between cells and target.

    `prefix` is the prefix layer where there is one: what it returns is then the state that the
    heads read. `ranks[k]` is how many tokens head k has to name; without it, `prepare` says so
    later. With `whole_rows` heads can be asked for all logits. `evaluated_params` are the weights
    that an evaluation of all heads reads.
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
        self.n_heads = file.size("head_count", _MAX_HEADS)
        self.accuracy = stored_accuracy(file, self.n_heads)
        self.n_params = file.header.n_parameters
        self.prefix: PrefixLayer | None = None
        self._grounded = file.flag("grounded", default=True)
        self.hidden = target.n_embd
        self.vocab_size = file.size("vocab_size")
        self._heads = _head_tensors(file, self.n_heads, grounded=self._grounded)
        names = [name for head in self._heads for name in head.names]
        self.n_blocks = max(len(head.blocks) for head in self._heads)
        prefix = plan_prefix(file) if file.flag("prefix_layer") else None
        names += [] if prefix is None else prefix.names
        # A head without an output matrix reads the target's, which its cost has to include.
        shared = sum(head.output is None for head in self._heads)
        own = multiplied(file.header, file.header.tensors)
        self.evaluated_params = own + shared * self.hidden * self.vocab_size
        self.whole_rows = whole_rows
        self._ranks: tuple[int, ...] = ()
        self._graphs: dict[tuple[int, int, bool], Graph] = {}
        self.device = ComputeDevice(device_for_heads(target), n_threads=n_threads)
        self._target = TargetTensors(target, self.device)
        self._weights: TensorStore | None = None
        try:
            self._weights = load_tensors(path, self.device, names)
            if prefix is not None:
                self.prefix = PrefixLayer(prefix, self._weights, self.device)
            self.embedding = self._target.embedding() if self._grounded else None
            self._output = self._target.output() if shared else None
            if ranks is not None:
                self.prepare(ranks)
        except BaseException:
            self.close()
            raise

    @property
    def native_seconds(self) -> float:
        """Time in the graphs of heads, chains and prefix layer, of all cells."""
        return self.device.native_seconds

    def cells(self, n_cells: int) -> HydraCells:
        """Return what one conversation needs, with room for `n_cells` in the prefix layer."""
        return HydraCells(self, n_cells)

    def prepare(self, ranks: Sequence[int]) -> None:
        """Say how many tokens each head has to name; heads without an entry are left out."""
        if not 0 < len(ranks) <= self.n_heads:
            raise OptionError(
                f"a tree of depth {len(ranks)}: these Hydra heads reach 1 to {self.n_heads} "
                "tokens deep"
            )
        # Graphs name a fixed number of tokens, so other ranks need other graphs.
        self._close_graphs()
        self._ranks = tuple(min(rank, self.vocab_size) for rank in ranks)

    def best_tokens(self, state: FloatRows, paths: Paths) -> npt.NDArray[np.int32]:
        """Return the best tokens [n, ranks] after each of n paths of one length, below a state.

        A path is the tokens from the target's own on; those of k + 1 tokens are head k's. The state
        is [hidden] for all paths or [n, hidden].
        """
        n, graph = self._evaluate(state, paths, probabilities=False)
        tokens = tokens_by_rank(graph, n)
        # Ungrounded heads said the same after every path: the one row is repeated.
        return tokens if n == len(paths) else tokens.repeat(len(paths), 0)

    def best_laws(self, state: FloatRows, paths: Sequence[Sequence[int]]) -> RankedTokens:
        """Return the same tokens with their log-probabilities."""
        n, graph = self._evaluate(state, paths, probabilities=True)
        best = ranked_tokens(graph, n)
        if n == len(paths):
            return best
        return RankedTokens(best.tokens.repeat(len(paths), 0), best.log_probs.repeat(len(paths), 0))

    def rows(self, state: FloatRows, paths: Paths) -> tuple[RankedTokens, list[FloatRows]]:
        """Return what `best_laws` does, and whole rows of logits: views that die with the next."""
        laws = self.best_laws(state, paths)
        n = len(paths) if self._grounded or state.ndim > 1 else 1
        graph = self._graphs[len(paths[0]) - 1, filled_width(n), True]
        whole = graph.peek("logits")[:n].astype(np.float32, copy=False)
        return laws, [whole[row % n] for row in range(len(paths))]

    @property
    def n_prepared(self) -> int:
        """How many heads are prepared: the longest path that can be asked about."""
        return len(self._ranks)

    def check_embeddings(self) -> None:
        """Raise UnsupportedModelError where a drafted token may have no embedding.

        Graphs of whole drafts feed them on unchecked.
        """
        if self.embedding is not None and self.embedding.shape[1] < self.vocab_size:
            raise UnsupportedModelError(
                f"tokens from {self.embedding.shape[1]} on have no embedding"
            )

    def close(self) -> None:
        """Free graphs, weights and device; calling it again does nothing."""
        self._close_graphs()
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._target.close()
        self.device.close()

    def _evaluate(
        self, state: FloatRows, paths: Sequence[Sequence[int]], *, probabilities: bool
    ) -> tuple[int, Graph]:
        """Run the graph of a head; return it, and for how many of the paths it ran.

        Heads that are not grounded say the same after all paths: one is enough.
        """
        head = len(paths[0]) - 1
        if not 0 <= head < len(self._ranks):
            most = len(self._ranks)
            raise OptionError(
                f"a path of {head + 1} tokens: these Hydra heads are prepared for {most}"
            )
        n = len(paths) if self._grounded or state.ndim > 1 else 1
        width = filled_width(n)
        key = head, width, probabilities
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._build(head, width, probabilities=probabilities)
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

    def _close_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()

    def _build(self, head: int, n: int, *, probabilities: bool) -> Graph:
        """Return the graph of a head for n paths."""
        with closing(GraphBuilder(self.device)) as builder:
            x = builder.input("state", F32, self.hidden, n)
            if self.embedding is not None:
                # The tokens lie path after path, so the embeddings of a path are one row already.
                tokens = builder.input("tokens", I32, n * (head + 1))
                embedded = builder.get_rows(self.embedding, tokens)
                x = builder.concat(x, builder.reshape(embedded, self.hidden * (head + 1), n))
            logits = self.logits(builder, head, x)
            add_ranking(builder, logits, self._ranks[head], probabilities=probabilities)
            if self.whole_rows and probabilities:
                builder.output("logits", logits)
            return builder.build()

    def logits(self, builder: GraphBuilder, head: int, x: Tensor) -> Tensor:
        """Return a head's logits (vocab, n) for what it reads, (width, n)."""
        tensors = self._heads[head]
        for index, block in enumerate(tensors.blocks):
            # Only the first block changes the width, so only there x itself cannot be the residual.
            skip = tensors.skip if index == 0 else None
            around = x if skip is None else self._linear(builder, *skip, x)
            x = builder.add(around, builder.silu(self._linear(builder, *block, x)))
        matrix = self._output if tensors.output is None else self._weight(tensors.output)
        assert matrix is not None
        logits = builder.mul_mat(matrix, x)
        bias = tensors.output_bias
        return logits if bias is None else builder.add(logits, self._weight(bias))

    def _linear(self, builder: GraphBuilder, weight: str, bias: str, x: Tensor) -> Tensor:
        return builder.add(builder.mul_mat(self._weight(weight), x), self._weight(bias))

    def _weight(self, name: str) -> Tensor:
        assert self._weights is not None
        return Tensor(self._weights[name])


class HydraCells:
    """One conversation's positions in the prefix layer of Hydra's heads, and its chains' graphs.

    `prefix` are the cells of the prefix layer, None where there is none: the heads then read the
    target's hidden states. What the heads say of a state depends on nothing else, so their own
    graphs are shared. Close it before them.
    """

    def __init__(self, head: HydraHead, n_cells: int) -> None:
        self._head = head
        self._native = NativeShare(head.device)
        self.prefix = None if head.prefix is None else head.prefix.cells(n_cells)
        self._n_cells = sys.maxsize if self.prefix is None else self.prefix.n_cells
        self._chains = PossibleGraphs(self._new_chains, self._native)
        self._trees = PlannedTrees(self._new_trees, self._native)

    @property
    def n_params(self) -> int:
        """The heads' parameters."""
        return self._head.n_params

    @property
    def depth_params(self) -> float:
        """A head's, and the output matrix that it reads."""
        return self._head.evaluated_params / self._head.n_heads

    @property
    def native_seconds(self) -> float:
        """Time in graphs that this conversation ran."""
        return self._native.seconds

    def states(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """Return what the heads read for the hidden states of positions `position` on, [n, hidden].

        That is what `PrefixCells.evaluate` makes of them; without a prefix layer themselves.
        """
        if self.prefix is None:
            return states
        with self._native:
            return self.prefix.evaluate(states, position, count)

    def best_tokens(self, state: FloatRows, paths: Paths) -> npt.NDArray[np.int32]:
        """Return the best tokens [n, ranks] after each path; see `HydraHead.best_tokens`."""
        with self._native:
            return self._head.best_tokens(state, paths)

    def best_laws(self, state: FloatRows, paths: Sequence[Sequence[int]]) -> RankedTokens:
        """Return the same tokens with their log-probabilities."""
        with self._native:
            return self._head.best_laws(state, paths)

    @property
    def whole_rows(self) -> bool:
        """Whether the heads can be asked for whole rows of logits."""
        return self._head.whole_rows

    @property
    def n_prepared(self) -> int:
        """The longest path that can be asked about."""
        return self._head.n_prepared

    def rows(self, state: FloatRows, paths: Paths) -> tuple[RankedTokens, list[FloatRows]]:
        """Return laws and whole rows; see `HydraHead.rows`."""
        with self._native:
            return self._head.rows(state, paths)

    def chain(
        self, piece: RowPiece, token: int, n: int, *, probabilities: bool = False
    ) -> ChainTokens | None:
        """Return n tokens of a greedy chain after a token and the last state of a piece.

        Its rows are hidden states [m, hidden]. With a prefix layer all of them pass through it, as
        in `PrefixCells.evaluate`. None where one graph cannot do it.
        """
        head, m = self._head, len(piece.rows)
        used = piece.count + m
        # In line, here and below: a call takes about 1 us behind an evaluation.
        if not (0 < n <= head.n_heads and 0 <= token < head.vocab_size and used <= self._n_cells):
            self._refuse(used, token, n)
        given = piece, token, n, probabilities
        return self._chains.draft(m, n, HydraChains.run, given)

    def tree(self, plan: TreePlan, piece: RowPiece, token: int) -> NamedChildren | None:
        """Return views of the children of a plan's tree after a token and a piece's last state.

        The piece is that of `chain`. None where one graph cannot do it.
        """
        head, n, m = self._head, len(plan.ranks), len(piece.rows)
        used = piece.count + m
        if not (0 < n <= head.n_heads and 0 <= token < head.vocab_size and used <= self._n_cells):
            self._refuse(used, token, n)
        return self._trees.of(plan).draft(m, n, HydraTrees.run, (piece, token))

    def _refuse(self, used: int, token: int, depth: int) -> NoReturn:
        """Say what a draft after a token, in cells up to `used`, has too much of."""
        head, prefix = self._head, self.prefix
        if not 0 < depth <= head.n_heads:
            reach = f"these Hydra heads reach 1 to {head.n_heads} tokens deep"
            raise OptionError(f"a chain of {depth} tokens: {reach}")
        if not 0 <= token < head.vocab_size:  # ggml would end the process
            raise OptionError(f"a token outside the {head.vocab_size} tokens of these Hydra heads")
        assert prefix is not None
        raise prefix.too_many(used)

    def _new_chains(self) -> HydraChains:
        self._head.check_embeddings()
        return HydraChains(self._head, self.prefix)

    def _new_trees(self, plan: TreePlan) -> HydraTrees:
        self._head.check_embeddings()
        return HydraTrees(self._head, self.prefix, plan)

    def close(self) -> None:
        """Free the graphs of whole drafts and the cells; calling it again does nothing."""
        self._chains.close()
        self._trees.close()
        if self.prefix is not None:
            self.prefix.close()


def _head_tensors(file: HeadFile, n_heads: int, *, grounded: bool) -> list[_HeadTensors]:
    """Return each head's tensors, checked."""
    hidden, vocab_size = file.size("embedding_length"), file.size("vocab_size")
    n_blocks = file.size("block_count", _MAX_BLOCKS)
    found: list[_HeadTensors] = []
    for head in range(n_heads):
        wide = hidden * (head + 2) if grounded else hidden
        widths = [wide] + [hidden] * (n_blocks - 1)
        blocks = tuple(
            _pair(file, f"hydra.{head}.res.{block}", width, hidden)
            for block, width in enumerate(widths)
        )
        skip = _pair(file, f"hydra.{head}.skip", wide, hidden) if grounded else None
        weight, bias = f"hydra.{head}.output.weight", f"hydra.{head}.output.bias"
        output = file.require(weight, (hidden, vocab_size)) if weight in file else None
        output_bias = file.require(bias, (vocab_size,)) if bias in file else None
        found.append(_HeadTensors(blocks, skip, output, output_bias))
    return found


def _pair(file: HeadFile, name: str, wide: int, hidden: int) -> tuple[str, str]:
    return file.require(f"{name}.weight", (wide, hidden)), file.require(f"{name}.bias", (hidden,))
