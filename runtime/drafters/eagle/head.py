"""EAGLE's head: one Llama layer over pairs of state and token, its cells, chains and trees."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import eq

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.ggml import F32, I32, I64, Graph, GraphBuilder
from specrun.bindings.ggml.tensor import Tensor
from specrun.bindings.ggml.weights import TensorStore
from specrun.bindings.models.model import Model
from specrun.runtime.heads.file import HeadFile
from specrun.runtime.heads.graphs import (
    AttentionSizes,
    HeadWeights,
    KeyValueCache,
    LengthGraphs,
    NativeShare,
    Places,
    RowPlaces,
    add_ranking,
    chain_width,
    fill_chain,
    fill_places,
    filled_width,
    mask_below,
    ranked_tokens,
    tokens_by_rank,
)
from specrun.runtime.heads.places import write_below
from specrun.runtime.heads.states import FloatRows, RowPiece
from specrun.runtime.heads.tree_graphs import (
    NamedChildren,
    NextRows,
    PlannedTrees,
    TreeGraphs,
    TreePlan,
)
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


class PairTrees(TreeGraphs):
    """The graphs of one conversation's trees over its cache. Close them before cache and head.

    Raises UnsupportedModelError if a drafted token may have no embedding, or the head has fewer
    tokens than a row has children.
    """

    def __init__(self, head: PairHead, cache: KeyValueCache, plan: TreePlan) -> None:
        if max(plan.ranks) > head.sizes.vocab_size:
            raise UnsupportedModelError("a tree with more branches than an EAGLE head has tokens")
        self._head, self._cache = head, cache
        self._ids = head.drafted_ids()
        super().__init__(head.device, plan, self._made)
        # Of each row below the root: its depth, and its place among the rows of that depth.
        self._depths = plan.row_depths[1:].astype(np.int32).data
        in_depth = [place for width in plan.widths for place in range(width)]
        self._places = np.array(in_depth[1:], np.int64).data

    def run(self, piece: RowPiece, last: int) -> NamedChildren:
        """Return the children below real pairs, whose rows go into the cells after theirs."""
        tokens, position, count = piece.tokens, piece.position, piece.count
        m = len(tokens)
        width, first = chain_width(m), count + m
        length = self._cache.length(first + len(self._depths))
        graph = self.get(length, width)
        cells = graph.cells
        fill_chain(graph, piece.rows, position, count, self._cache.spare)
        for row in range(width):
            cells["tokens"][row] = tokens[row] if row < m else 0
        if width > 1:
            cells["last"][0] = m - 1
        if len(self._depths):
            three = cells["row_positions"], cells["row_cells"], cells["own"]
            # The root's row stands at position + m - 1.
            write_below(*three, self._depths, self._places, position + m - 1, first, length)
        return self.named(graph)

    def _made(self, length: int, width: int) -> Graph:
        head, plan = self._head, self.plan
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

            def below(depth: int, rows: NextRows) -> Tensor:
                nonlocal mask, state
                here = plan.first_rows[depth] - 1, plan.widths[depth]
                zeros = self.zeros(builder, here[1])
                mask = mask_below(builder, mask, rows.parents, builder.columns(own, *here), zeros)
                at = builder.columns(positions, *here), builder.columns(cells, *here)
                embedded = builder.get_rows(head.embedding, rows.tokens)
                above = builder.get_rows(state, rows.parents)
                places = Places(self._cache, *at, mask)
                state, read = head.predicted(builder, embedded, above, places)
                return builder.mul_mat(head.output, read)

            return self.grow(builder, builder.mul_mat(head.output, read), below, self._ids)


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
        self.head, sizes = head, head.sizes
        self._native = NativeShare(head.device)
        self._cache = KeyValueCache(head.device, sizes.attention, n_cells, sizes.n_layers)
        # A round may need two lengths: of its pairs, and of the nodes below them.
        self._graphs = LengthGraphs(self._build, n_lengths=2)
        cache, share = self._cache, self._native
        self._trees = PlannedTrees(lambda plan: PairTrees(head, cache, plan), share)
        self.n_cells = self._cache.n_cells

    @property
    def native_seconds(self) -> float:
        """Time in this conversation's graphs."""
        return self._native.seconds

    def tree(self, plan: TreePlan, piece: RowPiece, last: int) -> NamedChildren | None:
        """Evaluate m real pairs and a tree below them in one graph: return views of its children.

        The pairs, a piece's tokens [m] and rows [m, features], go into their cells, the tree's rows
        into those after them. None if one graph cannot do it.
        """
        self._check(piece.tokens, piece.count + len(piece) + plan.n_drafted)
        return self._trees.draft(plan, piece, last)

    def drop(self, n: int, _position: int) -> None:
        """Forget the first n pairs; those behind move into their cells."""
        self._cache.drop(n)

    def copy(self, other: PairCells, base: int, count: int) -> bool:
        """Copy the first `count` pairs of another conversation; return True."""
        self._cache.copy(other._cache, count)
        return True

    def close(self) -> None:
        """Free graphs and cache; calling it again does nothing."""
        self._trees.close()
        self._graphs.close()
        self._cache.close()

    def evaluate(
        self,
        tokens: Sequence[int],
        states: FloatRows,
        places: RowPlaces,
        *,
        real: bool = False,
        highest: int = 0,
    ) -> EagleRows:
        """Evaluate pairs of tokens [n] and states [n, hidden] that the head predicted before them.

        `real`: the target's features [n, features] in the place of states. Keys and values go into
        the pairs' cells. `highest`: so many logits of each.
        """
        head, (n, more) = self.head, places[3].shape
        used = places[2] + more
        self._check(tokens, used)
        # Without taps one graph serves both kinds of pairs.
        key = filled_width(n), real and bool(head.taps), highest
        graph = self._graphs.get(self._cache.length(used), *key)
        fill_places(graph, tokens, states, places, self._cache.spare)
        with self._native:
            graph.compute()
        predicted = graph.floats("states")[:n].copy()
        if highest:
            [parted] = graph.numbers("parted")
            tied = any(map(eq, parted[0 : 2 * n : 2], parted[1 : 2 * n : 2]))
            named = head.target_tokens(tokens_by_rank(graph, n))
            best_logits = graph.floats("highest")[:n].copy()
            whole = self._whole_rows(graph, n) if tied else None
            return EagleRows(predicted, named, None, whole, best_logits)
        best, whole = ranked_tokens(graph, n), self._whole_rows(graph, n)
        return EagleRows(predicted, head.target_tokens(best.tokens), best.log_probs, whole)

    def _whole_rows(self, graph: Graph, n: int) -> FloatRows | None:
        """Return views: whole rows of a large vocabulary are too large to copy each depth."""
        head = self.head
        return head.target_rows(graph.floats("logits")[:n]) if head.whole_rows else None

    def _check(self, tokens: Sequence[int], used: int) -> None:
        """Refuse inputs that would end the process in ggml."""
        if used > self.n_cells:
            raise OptionError(f"an EAGLE head with {self.n_cells} cells cannot hold {used} pairs")
        n_embeddings = self.head.n_embeddings
        if min(tokens) < 0 or max(tokens) >= n_embeddings:
            raise OptionError(f"a token outside the {n_embeddings} tokens of an EAGLE head")

    def _build(self, length: int, n: int, fused: bool, highest: int) -> Graph:
        """Return the graph of n pairs that attend to the first `length` cells."""
        head, sizes = self.head, self.head.sizes
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


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes of a head and of its layer."""

    hidden: int
    """Of its predicted states."""
    features: int
    """Of the target's features in a pair."""
    vocab_size: int
    """How many tokens it has."""
    norm_eps: float
    attention: AttentionSizes
    n_layers: int = 1


class PairHead(HeadWeights, ABC):
    """The weights of a head on the target's device. Close it between its cells and the target.

    `names` are the tensors of the file to load, those of the first layer beginning with `prefix`;
    embedding and output matrix are the target's if the file has none, of the tokens `drafted`
    alone if these are given. `ranks` is how many tokens are named after each pair; `whole_rows`
    returns all logits, for draws.
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
        drafted: npt.NDArray[np.int32] | None,
        ranks: int,
        whole_rows: bool,
        n_threads: int,
    ) -> None:
        super().__init__(file, names, target, n_threads)
        self.sizes = sizes
        n_drafted = None if drafted is None else len(drafted)
        self.depth_params = multiplied_of_pair(file, target, n_drafted)
        self.ranks = min(ranks, sizes.vocab_size)
        self.whole_rows = whole_rows
        self._drafted_ids: Tensor | None = None
        # The target's tokens by the head's, if these differ.
        self._target_ids = drafted
        self._target_vocab_size = target.vocabulary.size
        try:
            self._file, self._layer = self.tensors(), self.tensors(prefix)
            self.embedding = self._file.get(_EMBEDDING) or self._target.embedding()
            self.output = self._file.get(_OUTPUT) or self._target_output()
            self.n_embeddings = self.embedding.shape[1]
        except BaseException:
            self.close()
            raise

    def cells(self, n_cells: int) -> PairCells:
        """Return room for `n_cells` pairs of one conversation, none of them known."""
        return PairCells(self, n_cells)

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

    def _target_output(self) -> Tensor:
        if self._target_ids is None:
            return self._target.output()
        return self._target.output_rows(self._target_ids)
