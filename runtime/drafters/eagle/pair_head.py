"""What EAGLE's heads have in common: one layer over pairs, as ggml graphs with a key-value cache of
their own.

A head is weights, loaded once; every conversation that drafts with it has cells of its own
(`PairHead.cells`).

The pair (f_j, t_(j+1)) joins a state of the target at position j with the token after it, and
stands at position j. The head predicts the next state, and with an output matrix the draft law of
t_(j+2). Below the last real pair it feeds itself its own predictions, one pair for each node of the
draft tree.

The sizes of a head over pairs, and what it says after them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.ggml import (
    F32,
    I32,
    ComputeDevice,
    Graph,
    GraphBuilder,
    TargetTensors,
    Tensor,
    TensorStore,
    load_tensors,
)
from specrun.bindings.model import Model
from specrun.runtime.drafters.eagle.pair_chain import PairChains, PairGraphParts
from specrun.runtime.heads import (
    AttentionSizes,
    ChainTokens,
    HeadFile,
    KeyValueCache,
    LayerWeights,
    NativeShare,
    Places,
    PossibleChains,
    add_ranking,
    decoder_layer,
    fill_places,
    filled_width,
    ranked_tokens,
)

FloatRows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes of a head: its predicted states, the target's features of a pair, the tokens it
    knows, its layer."""

    hidden: int
    features: int
    vocab_size: int
    feed_forward: int
    norm_eps: float
    attention: AttentionSizes


@dataclass(frozen=True, slots=True)
class EagleRows:
    """What a head says after n pairs: predicted states [n, hidden] and its best tokens.

    `tokens` (of the target) and `log_probs` are [n, ranks], the most likely first; `logits`
    [n, target vocab] where they were asked for: a view, which dies with the head's next evaluation.
    """

    states: FloatRows
    tokens: npt.NDArray[np.int32]
    log_probs: FloatRows
    logits: FloatRows | None


_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


class PairHead(ABC):
    """The weights of a head on the target's device. Close it after the cells it made, before the
    target.

    `ranks` is how many tokens are named after each pair; `whole_rows` returns all logits, for
    draws. `names` are the tensors of the file to load, those of the layer beginning with `prefix`;
    embedding and output matrix are the target's where the file has none.
    """

    taps: tuple[int, ...] = ()
    """The layers of the target whose inputs, one after the other, are its features; none: its final
    hidden state."""

    def __init__(
        self,
        file: HeadFile,
        names: Sequence[str],
        prefix: str,
        sizes: PairSizes,
        target: Model,
        *,
        ranks: int,
        whole_rows: bool,
        n_threads: int,
    ) -> None:
        self.sizes = sizes
        self.n_params = file.header.n_parameters
        self.ranks = min(ranks, sizes.vocab_size)
        self.whole_rows = whole_rows
        self.device = ComputeDevice(gpu=target.n_gpu_layers != 0, n_threads=n_threads)
        self._prefix = prefix
        self._target = TargetTensors(target, self.device)
        self._stores: list[TensorStore] = []
        self._chain_parts: PairGraphParts | None = None
        self._target_ids: npt.NDArray[np.int32] | None = (
            None  # the target's tokens by the head's, where these differ
        )
        try:
            self._weights = load_tensors(file.path, self.device, names)
            self._stores.append(self._weights)
            self.embedding = self._own(_EMBEDDING) or self._target.embedding()
            self.output = self._own(_OUTPUT) or self._target.output()
            self.n_embeddings = self.embedding.shape[1]
        except BaseException:
            self.close()
            raise

    @property
    def native_seconds(self) -> float:
        """Time in the graphs of all cells."""
        return self.device.native_seconds

    def cells(self, n_cells: int) -> PairCells:
        """Return what one conversation needs of the head: room for `n_cells` pairs of its own, none
        of them known."""
        return PairCells(self, n_cells)

    def close(self) -> None:
        """Free weights and device; calling it again does nothing."""
        while self._stores:
            self._stores.pop().close()
        self._target.close()
        self.device.close()

    # -- what a kind of head says ------------------------------------------------------------------

    def fused(self, builder: GraphBuilder, features: Tensor) -> Tensor:
        """Return the states (hidden, n) that taps (features, n) become; asked of heads with taps
        only."""
        return features

    @abstractmethod
    def predicted(
        self, builder: GraphBuilder, tokens: Tensor, states: Tensor, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Return the predicted states (hidden, n) and what the output matrix reads, for pairs of
        both."""

    def target_rows(self, logits: FloatRows) -> FloatRows:
        """Return logits over the head's tokens, [n, vocab], as logits over the target's."""
        return logits

    def target_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the target's tokens for the head's, [n, ranks]."""
        return tokens if self._target_ids is None else self._target_ids[tokens]

    def chain_parts(self) -> PairGraphParts:
        """Return what graphs of chains are made of.

        Raises UnsupportedModelError where a drafted token may have no embedding.
        """
        if self._chain_parts is None:
            ids, table = self._target_ids, None
            largest = self.output.shape[1] - 1 if ids is None else int(ids.max())
            if largest >= self.n_embeddings:
                raise UnsupportedModelError(f"token {largest} of an EAGLE head has no embedding")
            if ids is not None:
                store = TensorStore(self.device, {"ids": ("I32", (1, len(ids)))})
                self._stores.append(store)
                store.write("ids", ids)
                table = Tensor(store["ids"])
            self._chain_parts = PairGraphParts(
                self.sizes.features, self.embedding, self.output, table, self.fused, self.predicted
            )
        return self._chain_parts

    # -- the parts of a layer ----------------------------------------------------------------------

    def _weight(self, name: str) -> Tensor:
        return Tensor(self._weights[f"{self._prefix}{name}"])

    def _own(self, name: str) -> Tensor | None:
        return Tensor(self._weights[name]) if name in self._weights else None

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


class PairCells:
    """One conversation's pairs of a head: their keys and values, and the graphs over them.

    There is room for `n_cells` pairs, which is what was asked for, rounded up. Close it before the
    head.
    """

    def __init__(self, head: PairHead, n_cells: int) -> None:
        self._head = head
        self._native = NativeShare(lambda: head.native_seconds)
        self._graphs: dict[tuple[bool, int, int], Graph] = {}
        self._cache = KeyValueCache(head.device, head.sizes.attention, n_cells)
        self._chains = PossibleChains(
            lambda: PairChains(head.device, self._cache, head.chain_parts())
        )
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
    def native_seconds(self) -> float:
        """Time in this conversation's graphs."""
        return self._native.seconds

    def evaluate(
        self,
        tokens: Sequence[int],
        states: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
    ) -> EagleRows:
        """Evaluate n pairs of a token and the state that the head predicted before it, [n, hidden].

        Keys and values go into `cells` [n]; pair i attends to the cells that `sees`
        [n, cells in use] marks, its own among them.
        """
        return self._evaluate(tokens, states, positions, cells, sees, real=False)

    def evaluate_features(
        self,
        tokens: Sequence[int],
        features: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
    ) -> EagleRows:
        """Evaluate n pairs of a token and the target's features before it, [n, features]; otherwise
        as `evaluate`."""
        return self._evaluate(tokens, features, positions, cells, sees, real=True)

    def chain(
        self,
        tokens: Sequence[int],
        features: FloatRows,
        position: int,
        count: int,
        n: int,
        *,
        probabilities: bool = False,
    ) -> ChainTokens | None:
        """Evaluate m real pairs and a greedy chain below them at once: return its n tokens.

        The pairs, tokens [m] and features [m, features] of positions `position` on, go into the
        cells after the first `count`, those of the first n - 1 tokens after them; each sees all
        cells before its own. None where the backends cannot compute it in one graph, or the numbers
        are too large for one.
        """

        def run(chains: PairChains) -> ChainTokens:
            self._check(tokens, count + len(tokens) + n - 1)
            with self._native:
                return chains.run(tokens, features, position, count, n, probabilities=probabilities)

        return self._chains.draft(len(tokens), n, run)

    def close(self) -> None:
        """Free graphs and cache; calling it again does nothing."""
        self._chains.close()
        while self._graphs:
            self._graphs.popitem()[1].close()
        self._cache.close()

    def _evaluate(
        self,
        tokens: Sequence[int],
        states: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
        *,
        real: bool,
    ) -> EagleRows:
        head, (n, used) = self._head, sees.shape
        self._check(tokens, used)
        graph = self._graph(filled_width(n), self._cache.length(used), real=real)
        inputs = graph.inputs
        fill_places(inputs, positions, cells, sees, self._cache.spare)
        inputs["tokens"][0, :n], inputs["tokens"][0, n:] = tokens, 0
        inputs["states"][:n], inputs["states"][n:] = states, 0.0
        with self._native:
            graph.compute()
        best = ranked_tokens(graph, n)
        return EagleRows(
            _floats(graph.read("states"))[:n],
            head.target_tokens(best.tokens),
            best.log_probs,
            head.target_rows(_floats(graph.peek("logits"))[:n]) if head.whole_rows else None,
        )

    def _check(self, tokens: Sequence[int], used: int) -> None:
        """Refuse what would end the process in ggml."""
        if used > self.n_cells:
            raise OptionError(f"an EAGLE head with {self.n_cells} cells cannot hold {used} pairs")
        n_embeddings = self._head.n_embeddings
        if min(tokens) < 0 or max(tokens) >= n_embeddings:
            raise OptionError(f"a token outside the {n_embeddings} tokens of an EAGLE head")

    def _graph(self, width: int, length: int, *, real: bool) -> Graph:
        """Return the graph for so many pairs that attend to the first `length` cells."""
        fused = real and bool(self._head.taps)  # without taps one graph serves both
        graph = self._graphs.get((fused, width, length))
        if graph is None:
            self._close_graphs_but(length)
            graph = self._graphs[fused, width, length] = self._build(width, length, fused=fused)
        return graph

    def _close_graphs_but(self, length: int) -> None:
        """Close all graphs but those of this length and the newest other one, which a round may
        need beside it.

        Each has memory of its own: those of all lengths of a long text would be gigabytes.
        """
        newest = next((key[2] for key in reversed(self._graphs) if key[2] != length), length)
        for key in [key for key in self._graphs if key[2] not in (length, newest)]:
            self._graphs.pop(key).close()

    def _build(self, n: int, length: int, *, fused: bool) -> Graph:
        head, builder = self._head, GraphBuilder(self._head.device)
        try:
            tokens = builder.input("tokens", I32, n)
            states = builder.input(
                "states", F32, head.sizes.features if fused else head.sizes.hidden, n
            )
            if fused:
                states = head.fused(builder, states)
            places = self._cache.places(builder, n, length)
            predicted, read = head.predicted(
                builder, builder.get_rows(head.embedding, tokens), states, places
            )
            logits = builder.mul_mat(head.output, read)
            builder.output("states", predicted)
            add_ranking(builder, logits, head.ranks)
            if head.whole_rows:
                builder.output("logits", logits)
            return builder.build()
        finally:
            builder.close()


def _floats(array: npt.NDArray[np.generic]) -> FloatRows:
    return array.astype(np.float32, copy=False)
