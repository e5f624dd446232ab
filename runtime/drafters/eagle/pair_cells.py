"""The pairs of one conversation in an EAGLE head: keys and values, and the graphs over them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import eq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml.functions import F32, I32
from specrun.bindings.ggml.graph import GraphBuilder
from specrun.bindings.ggml.ready_graph import Graph
from specrun.runtime.drafters.eagle.pair_chain import PairChains
from specrun.runtime.drafters.eagle.pair_tree import PairTrees
from specrun.runtime.heads.attention import KeyValueCache, RowPlaces, fill_places
from specrun.runtime.heads.graphs import (
    ChainTokens,
    NativeShare,
    PossibleGraphs,
    add_ranking,
    filled_width,
    first_rows,
    ranked_tokens,
    tokens_by_rank,
)
from specrun.runtime.heads.text_rows import FloatRows, RowPiece
from specrun.runtime.heads.tree_graphs import NamedChildren, PlannedTrees, TreePlan

if TYPE_CHECKING:
    from specrun.runtime.drafters.eagle.pair_head import PairHead


@dataclass(slots=True)
class EagleRows:
    """What a head says after n pairs: predicted states [n, hidden] and its best tokens.

    `tokens` (of the target) and `log_probs` are [n, ranks], the most likely first; `logits`
    [n, target vocab] where they were asked for: a view, which dies with the head's next evaluation.
    Where the highest logits were asked for, `highest` are those of `tokens`, in the order of the
    tokens' ids, and there are no `log_probs`; whole rows then come only where the lowest of the
    highest has an equal, so that ids have to decide.
    """

    states: FloatRows
    tokens: npt.NDArray[np.int32]
    log_probs: FloatRows | None
    logits: FloatRows | None
    highest: FloatRows | None = None

    @property
    def n_highest(self) -> int:
        """How many of the highest logits were asked for; 0 for log-probabilities."""
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

    There is room for `n_cells` pairs: what was asked for, rounded up. Close it before the head.
    """

    def __init__(self, head: PairHead, n_cells: int) -> None:
        self._head = head
        self._native = NativeShare(head.device)
        self._graphs: dict[tuple[bool, int, int, int], Graph] = {}
        self._cache = KeyValueCache(head.device, head.sizes.attention, n_cells)
        cache, share = self._cache, self._native
        self._chains = PossibleGraphs(lambda: PairChains(head, cache), share)
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
        """How many of the highest logits it can be asked for."""
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

        Their keys and values go into their cells. `highest` asks for so many logits of each.
        """
        return self._evaluate(tokens, states, places, real=False, highest=highest)

    def evaluate_features(
        self, tokens: Sequence[int], features: FloatRows, places: RowPlaces, *, highest: int = 0
    ) -> EagleRows:
        """Evaluate pairs of tokens [n] and the target's features before them, [n, features]."""
        return self._evaluate(tokens, features, places, real=True, highest=highest)

    def chain(self, piece: RowPiece, n: int, *, probabilities: bool = False) -> ChainTokens | None:
        """Evaluate m real pairs and a greedy chain below them in one graph: return its n tokens.

        The pairs, a piece's tokens [m] and rows [m, features], go into their cells, those of the
        first n - 1 tokens after them; each sees all cells before its own. None where one graph
        cannot do it.
        """
        tokens = piece.tokens
        m = len(tokens)
        self._check(tokens, piece.count + m + n - 1)
        return self._chains.draft(m, n, PairChains.run, (piece, n, probabilities))

    def tree(self, plan: TreePlan, piece: RowPiece) -> NamedChildren | None:
        """Evaluate m real pairs and a tree below them in one graph: return views of its children.

        The pairs are those of `chain`; the tree's rows go into the cells after theirs. None where
        one graph cannot do it.
        """
        tokens = piece.tokens
        m = len(tokens)
        self._check(tokens, piece.count + m + plan.n_drafted)
        return self._trees.of(plan).draft(m, len(plan.ranks), PairTrees.run, piece)

    def close(self) -> None:
        """Free graphs and cache; calling it again does nothing."""
        self._chains.close()
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
        """Refuse what would end the process in ggml."""
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
        with closing(GraphBuilder(head.device)) as builder:
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
                # Draws transform logits themselves: nobody asks for the sum over the vocabulary.
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
