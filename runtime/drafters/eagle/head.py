"""EAGLE's head: one Llama layer over pairs of state and token, its cells, chains and trees."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import eq
from typing import Required, TypedDict

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.ggml import F32, I32, I64, Graph, GraphBuilder
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.tensor import Tensor
from specrun.bindings.ggml.weights import TargetTensors, TensorStore, device_for_heads, load_tensors
from specrun.bindings.models.model import Model
from specrun.runtime.heads.file import HeadFile
from specrun.runtime.heads.graphs import (
    AttentionSizes,
    KeyValueCache,
    LayerWeights,
    NativeShare,
    Places,
    RowPlaces,
    add_ranking,
    chain_width,
    decoder_layer,
    fill_chain,
    fill_places,
    filled_width,
    first_rows,
    mask_below,
    ranked_tokens,
    tokens_by_rank,
)
from specrun.runtime.heads.places import write_below
from specrun.runtime.heads.states import FloatRows, RowPiece
from specrun.runtime.heads.tree_graphs import NamedChildren, PlannedTrees, TreeGraphs, TreePlan
from specrun.runtime.planning.theory import multiplied

# == A tree of best tokens as one graph: the pairs accepted last, then all depths ==================
#
# Depth by depth, a round costs an evaluation, its inputs and its outputs for every depth. Here the
# best tokens of a depth and the states predicted with them are the next pairs inside the graph, and
# only tokens come back: for chains, EAGLE-1's trees of a fixed shape and EAGLE-2's dynamic ones.
# A row below another is the pair of its token with the state that was predicted at that other. It
# sees the cells of the row above it, and its own: its mask is a copy of that row's with one cell
# more, made inside the graph, because in a dynamic tree only the graph computes which row is above.


_TREE_OPERATIONS = 112  # of a graph for each depth, and for the pairs before it
_LAYER_OPERATIONS = 48  # of each layer behind the first


def fill_tokens(graph: Graph, tokens: list[int]) -> None:
    """Fill a graph of several rows with the tokens of the real ones, and mark the last."""
    cells = graph.cells["tokens"]
    for row in range(len(cells)):
        cells[row] = tokens[row] if row < len(tokens) else 0
    graph.cells["last"][0] = len(tokens) - 1


class PairTrees:
    """The graphs of one conversation's trees over its cache. Close them before cache and head.

    Raises UnsupportedModelError if a drafted token may have no embedding, or the head has fewer
    tokens than a row has children.
    """

    def __init__(self, head: PairHead, cache: KeyValueCache, plan: TreePlan) -> None:
        if max(plan.ranks) > head.sizes.vocab_size:
            raise UnsupportedModelError("a tree with more branches than an EAGLE head has tokens")
        self._head, self._cache = head, cache
        self._ids = head.drafted_ids()
        self._graphs = TreeGraphs(head.device, plan, self._build)
        # Of each row below the root: its depth, and its place among the rows of that depth.
        self._depths = plan.row_depths[1:].astype(np.int32).data
        in_depth = [place for width in plan.widths for place in range(width)]
        self._places = np.array(in_depth[1:], np.int64).data

    def run(self, piece: RowPiece) -> NamedChildren:
        """Return the children below m real pairs, a piece's tokens [m] and rows [m, features].

        The rows of the tree go into the cells after theirs. Raises UnsupportedModelError if no
        backend computes the graph.
        """
        tokens, features, position, count = piece.tokens, piece.rows, piece.position, piece.count
        m = len(tokens)
        width, first = chain_width(m), count + m
        length = self._cache.length(first + len(self._depths))
        graph = self._graphs.get(length, (width,))
        cells = graph.cells
        fill_chain(graph, features, position, count, self._cache.spare)
        if width == 1:
            cells["tokens"][0] = tokens[0]
        else:
            fill_tokens(graph, tokens)
        if len(self._depths):
            three = cells["row_positions"], cells["row_cells"], cells["own"]
            # The root's row stands at position + m - 1.
            write_below(*three, self._depths, self._places, position + m - 1, first, length)
        return self._graphs.run(graph)

    def close(self) -> None:
        """Free graphs and table."""
        self._graphs.close()

    def _build(self, length: int, width: int) -> Graph:
        head, trees, plan = self._head, self._graphs, self._graphs.plan
        each = _TREE_OPERATIONS + _LAYER_OPERATIONS * (head.sizes.n_layers - 1)
        with closing(GraphBuilder(head.device, each * (len(plan.widths) + 1))) as builder:
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


# == The pairs of one conversation: keys and values, and the graphs over them ======================


@dataclass(slots=True)
class EagleRows:
    """A head's results after n pairs: predicted states [n, hidden] and its best tokens.

    `tokens` (of the target) and `log_probs` are [n, ranks], the most likely first; `logits`
    [n, target vocab] if they were requested: a view, which dies with the head's next evaluation.
    If the highest logits were requested, `highest` are those of `tokens`, in the order of the
    tokens' ids, and there are no `log_probs`; whole rows then come only if the lowest of the
    highest has an equal, so that ids have to decide.
    """

    states: FloatRows
    tokens: npt.NDArray[np.int32]
    log_probs: FloatRows | None
    logits: FloatRows | None
    highest: FloatRows | None = None

    @property
    def n_highest(self) -> int:
        """How many of the highest logits were requested; 0 for log-probabilities."""
        return 0 if self.highest is None else self.highest.shape[1]

    @property
    def whole(self) -> list[npt.NDArray[np.float32]]:
        """The rows of logits; raises `OptionError` of a head that was not opened for them."""
        if self.logits is None:
            raise OptionError("an EAGLE head that draws must be opened with whole rows")
        return list(self.logits)

    def last(self) -> EagleRows:
        """Return the last row alone, with all that outlives the head's next evaluation."""
        if self.logits is None and len(self.states) == 1:
            return self
        # A copy of one row, as the view dies while the draft is still drawn from it.
        logits = None if self.logits is None else self.logits[-1:].copy()
        log_probs = None if self.log_probs is None else self.log_probs[-1:]
        highest = None if self.highest is None else self.highest[-1:]
        return EagleRows(self.states[-1:], self.tokens[-1:], log_probs, logits, highest)


class PairCells:
    """One conversation's pairs of a head: their keys and values, and the graphs over them.

    There is room for `n_cells` pairs: the requested number, rounded up. Close it before the head.
    """

    def __init__(self, head: PairHead, n_cells: int) -> None:
        self._head = head
        self._native = NativeShare(head.device)
        self._graphs: dict[tuple[bool, int, int, int], Graph] = {}
        sizes = head.sizes
        self._cache = KeyValueCache(head.device, sizes.attention, n_cells, sizes.n_layers)
        cache, share = self._cache, self._native
        self._trees = PlannedTrees(lambda plan: PairTrees(head, cache, plan), share)
        self.n_cells = self._cache.n_cells

    @property
    def taps(self) -> tuple[int, ...]:
        """The head's: which inputs of the target's layers it reads."""
        return self._head.taps

    @property
    def n_params(self) -> int:
        """The head's parameters."""
        return self._head.n_params

    @property
    def depth_params(self) -> float:
        """The head's."""
        return self._head.depth_params

    @property
    def most_highest(self) -> int:
        """How many of the highest logits it can return."""
        return self._head.most_highest

    @property
    def whole_rows(self) -> bool:
        """Whether it returns whole rows of logits."""
        return self._head.whole_rows

    @property
    def native_seconds(self) -> float:
        """Time in this conversation's graphs."""
        return self._native.seconds

    def evaluate(
        self, tokens: Sequence[int], states: FloatRows, places: RowPlaces, *, highest: int = 0
    ) -> EagleRows:
        """Evaluate pairs of tokens [n] and states [n, hidden] that the head predicted before them.

        Their keys and values go into their cells. `highest`: so many logits of each.
        """
        return self._evaluate(tokens, states, places, real=False, highest=highest)

    def evaluate_features(
        self, tokens: Sequence[int], features: FloatRows, places: RowPlaces, *, highest: int = 0
    ) -> EagleRows:
        """Evaluate pairs of tokens [n] and the target's features before them, [n, features]."""
        return self._evaluate(tokens, features, places, real=True, highest=highest)

    def tree(self, plan: TreePlan, piece: RowPiece) -> NamedChildren | None:
        """Evaluate m real pairs and a tree below them in one graph: return views of its children.

        The pairs, a piece's tokens [m] and rows [m, features], go into their cells, the tree's rows
        into those after them. None if one graph cannot do it.
        """
        tokens = piece.tokens
        m = len(tokens)
        self._check(tokens, piece.count + m + plan.n_drafted)
        return self._trees.draft(plan, m, PairTrees.run, piece)

    def drop(self, n: int, _position: int) -> None:
        """Forget the first n pairs; those behind move into their cells."""
        self._cache.drop(n)

    def copy(self, other: PairCells, n: int) -> None:
        """Copy the first n pairs of another conversation."""
        self._cache.copy(other._cache, n)

    def close(self) -> None:
        """Free graphs and cache; calling it again does nothing."""
        self._trees.close()
        while self._graphs:
            self._graphs.popitem()[1].close()
        self._cache.close()

    def _evaluate(
        self,
        tokens: Sequence[int],
        states: FloatRows,
        places: RowPlaces,
        *,
        real: bool,
        highest: int,
    ) -> EagleRows:
        head, (n, more) = self._head, places[3].shape
        used = places[2] + more
        self._check(tokens, used)
        # Without taps one graph serves both kinds of pairs.
        key = real and bool(head.taps), filled_width(n), self._cache.length(used), highest
        graph = self._graph(*key)
        fill_places(graph, tokens, states, places, self._cache.spare)
        with self._native:
            graph.compute()
        predicted = first_rows(graph.floats("states"), n)
        if highest:
            [parted] = graph.numbers("parted")
            tied = any(map(eq, parted[0 : 2 * n : 2], parted[1 : 2 * n : 2]))
            named = head.target_tokens(tokens_by_rank(graph, n))
            best_logits = first_rows(graph.floats("highest"), n)
            whole = self._whole_rows(graph, n) if tied else None
            return EagleRows(predicted, named, None, whole, best_logits)
        best, whole = ranked_tokens(graph, n), self._whole_rows(graph, n)
        return EagleRows(predicted, head.target_tokens(best.tokens), best.log_probs, whole)

    def _whole_rows(self, graph: Graph, n: int) -> FloatRows | None:
        """Return views: whole rows of a large vocabulary are too large to copy each depth."""
        head = self._head
        return head.target_rows(graph.floats("logits")[:n]) if head.whole_rows else None

    def _check(self, tokens: Sequence[int], used: int) -> None:
        """Refuse inputs that would end the process in ggml."""
        if used > self.n_cells:
            raise OptionError(f"an EAGLE head with {self.n_cells} cells cannot hold {used} pairs")
        n_embeddings = self._head.n_embeddings
        if min(tokens) < 0 or max(tokens) >= n_embeddings:
            raise OptionError(f"a token outside the {n_embeddings} tokens of an EAGLE head")

    def _graph(self, fused: bool, width: int, length: int, highest: int) -> Graph:
        """Return the graph for so many pairs that attend to the first `length` cells."""
        graph = self._graphs.get((fused, width, length, highest))
        if graph is None:
            # Each has memory of its own: those of all lengths of a long text would be gigabytes. A
            # round may need two lengths, so the newest other one stays.
            newest = next((key[2] for key in reversed(self._graphs) if key[2] != length), length)
            for key in [key for key in self._graphs if key[2] not in (length, newest)]:
                self._graphs.pop(key).close()
            graph = self._build(width, length, fused=fused, highest=highest)
            self._graphs[fused, width, length, highest] = graph
        return graph

    def _build(self, n: int, length: int, *, fused: bool, highest: int) -> Graph:
        head, sizes = self._head, self._head.sizes
        operations = 256 + _LAYER_OPERATIONS * (sizes.n_layers - 1)
        with closing(GraphBuilder(head.device, operations)) as builder:
            tokens = builder.input("tokens", I32, n)
            states = builder.input("rows", F32, sizes.features if fused else sizes.hidden, n)
            if fused:
                states = head.fused(builder, states)
            places = self._cache.places(builder, n, length)
            embedded = builder.get_rows(head.embedding, tokens)
            predicted, read = head.predicted(builder, embedded, states, places)
            logits = builder.mul_mat(head.output, read)
            builder.output("states", predicted)
            if highest:
                # Draws transform logits themselves: nobody needs the sum over the vocabulary.
                best, values = builder.best(logits, highest)
                builder.output("parted", builder.columns(values, highest - 2, 2))
                best, order = builder.ascending(best)
                builder.output("tokens", best)
                builder.output("highest", builder.pick(values, order, highest))
            else:
                add_ranking(builder, logits, head.ranks)
            if head.whole_rows:
                builder.output("logits", logits)
            return builder.build()


# == The layer =====================================================================================
#
# A head is weights, loaded once (`PairHead`); every conversation that drafts with it has cells of
# its own (`PairHead.cells`).
#
# The pair (f_j, t_(j+1)) joins a state of the target at position j with the token after it, and
# stands at position j. The head predicts the next state, and with an output matrix the draft
# distribution of t_(j+2). Below the last real pair it feeds itself its own predictions, one pair
# for each node of the draft tree.


_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def multiplied_of_pair(file: HeadFile, target: Model, n_drafted: int | None) -> float:
    """Return how many parameters a depth multiplies: the head's, and an output matrix.

    That is the target's if the file has none, of the `n_drafted` tokens alone, if that is given.
    """
    own = multiplied(file.header, file.header.tensors)
    rows = 0 if _OUTPUT in file else n_drafted or target.vocabulary.size
    return own + target.n_embd * rows


class PairOptions(TypedDict, total=False):
    """How a head is opened: the results after each pair, and the number of threads.

    `ranks` is how many tokens are named; `whole_rows` returns all logits, for draws.
    """

    ranks: Required[int]
    whole_rows: bool
    n_threads: int


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes of a head and of its layer."""

    hidden: int
    """Of its predicted states."""
    features: int
    """Of the target's features in a pair."""
    vocab_size: int
    """How many tokens it has."""
    feed_forward: int
    norm_eps: float
    attention: AttentionSizes
    n_layers: int = 1


class PairHead(ABC):
    """The weights of a head on the target's device. Close it between its cells and the target.

    `names` are the tensors of the file to load, those of the first layer beginning with `prefix`;
    embedding and output matrix are the target's if the file has none, of the tokens `drafted`
    alone if these are given. For the other options see `PairOptions`.
    """

    taps: tuple[int, ...] = ()
    """The layers of the target whose inputs are its features; none: the final hidden state."""

    def __init__(
        self,
        file: HeadFile,
        names: Sequence[str],
        prefix: str,
        sizes: PairSizes,
        target: Model,
        drafted: npt.NDArray[np.int32] | None = None,
        *,
        ranks: int,
        whole_rows: bool = False,
        n_threads: int = 0,
    ) -> None:
        self.sizes = sizes
        self.n_params = file.header.n_parameters
        n_drafted = None if drafted is None else len(drafted)
        self.depth_params = multiplied_of_pair(file, target, n_drafted)
        self.ranks = min(ranks, sizes.vocab_size)
        self.whole_rows = whole_rows
        self.device = ComputeDevice(device_for_heads(target), n_threads=n_threads)
        self._prefix = prefix
        self._target = TargetTensors(target, self.device)
        self._stores: list[TensorStore] = []
        self._drafted_ids: Tensor | None = None
        # The target's tokens by the head's, if these differ.
        self._target_ids = drafted
        self._target_vocab_size = target.vocabulary.size
        try:
            self._weights = load_tensors(file.path, self.device, names)
            self._stores.append(self._weights)
            self.embedding = self._own(_EMBEDDING) or self._target.embedding()
            self.output = self._own(_OUTPUT) or self._target_output()
            self.n_embeddings = self.embedding.shape[1]
        except BaseException:
            self.close()
            raise

    @property
    def native_seconds(self) -> float:
        """Time in the graphs of all cells."""
        return self.device.native_seconds

    def cells(self, n_cells: int) -> PairCells:
        """Return room for `n_cells` pairs of one conversation, none of them known."""
        return PairCells(self, n_cells)

    def close(self) -> None:
        """Free weights and device; calling it again does nothing."""
        while self._stores:
            self._stores.pop().close()
        self._target.close()
        self.device.close()

    # -- the parts of a kind of head ---------------------------------------------------------------

    def fused(self, builder: GraphBuilder, features: Tensor) -> Tensor:
        """Return the states (hidden, n) that the features (features, n) become."""
        return features

    @abstractmethod
    def predicted(
        self, builder: GraphBuilder, tokens: Tensor, states: Tensor, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Return the predicted states (hidden, n), and the output matrix's inputs of them."""

    def target_rows(self, logits: FloatRows) -> FloatRows:
        """Return logits over the head's tokens, [n, vocab], as logits over the target's.

        Those that the head does not have get -inf.
        """
        if self._target_ids is None:
            return logits
        # Zero mass in the draft distribution: exact, the target itself chooses tokens that the head
        # cannot.
        rows = np.full((len(logits), self._target_vocab_size), -np.inf, np.float32)
        rows[:, self._target_ids] = logits
        return rows

    @functools.cached_property
    def most_highest(self) -> int:
        """How many of the highest logits its cells can return.

        None if the order of its own tokens is not that of the target's.
        """
        ids = self._target_ids
        return self.sizes.vocab_size if ids is None or bool((np.diff(ids) > 0).all()) else 0

    def target_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the target's tokens for the head's, [n, ranks]."""
        return tokens if self._target_ids is None else self._target_ids[tokens]

    def drafted_ids(self) -> Tensor | None:
        """Return the target's tokens by the head's, I32 (1, vocab), None if they are the same.

        Graphs of trees feed them on. Raises UnsupportedModelError if one has no embedding.
        """
        ids = self._target_ids
        # A tree's tokens go on unchecked, and one without an embedding would end the process.
        largest = self.output.shape[1] - 1 if ids is None else int(ids.max())
        if largest >= self.n_embeddings:
            raise UnsupportedModelError(f"token {largest} of an EAGLE head has no embedding")
        if ids is not None and self._drafted_ids is None:
            store = TensorStore(self.device, {"ids": ("I32", (1, len(ids)))})
            self._stores.append(store)
            store.write("ids", ids)
            self._drafted_ids = Tensor(store["ids"])
        return self._drafted_ids

    # -- the parts of a layer ----------------------------------------------------------------------

    def _weight(self, name: str) -> Tensor:
        return Tensor(self._weights[f"{self._prefix}{name}"])

    def _own(self, name: str) -> Tensor | None:
        return Tensor(self._weights[name]) if name in self._weights else None

    def _target_output(self) -> Tensor:
        if self._target_ids is None:
            return self._target.output()
        return self._target.output_rows(self._target_ids)

    def _layer(
        self,
        builder: GraphBuilder,
        x: Tensor,
        residual: Tensor,
        places: Places,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Return y + mlp(norm(y)) with y = residual + attention(x)."""
        weights = LayerWeights(self._weights, self._prefix)
        return decoder_layer(builder, weights, x, residual, places, self.sizes.norm_eps, factors)
