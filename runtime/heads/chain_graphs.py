"""The graphs of chains: by rows before the chain, tokens in it, and whether probabilities are
returned.

The tokens of a greedy chain as part of a graph: each depth's best token is found and fed on inside
the graph.

A token is left in a table that outlives the graph, so a whole chain comes back in one read. Which
tokens ggml's backends can do this for is asked when a graph is built: `UnsupportedModelError` says
that one cannot.

Graphs over a cache that are kept to be run again: all of them read the same number of its cells.

The chains of a head as one graph, where its backends can compute them; where they cannot, that is
found out once.

A few graph sizes serve all batches: rows are filled up to the next one.

The best tokens of each row of logits with their log-probabilities, found where the logits are
computed.

Only a few numbers of each row leave the device: top-k and log-sum-exp are part of a head's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.ggml import ComputeDevice, Graph, GraphBuilder, Tensor, TensorStore

MOST_CHAIN_TOKENS = 64
"""The longest chain of one graph."""

_WIDTHS = (1, 2, 4, 8)  # few, because each is a graph of all depths
MOST_CHAIN_ROWS = _WIDTHS[-1]
"""The most rows that a chain's graph catches up on before it drafts."""


@dataclass(frozen=True, slots=True)
class ChainTokens:
    """A greedy chain: its tokens (of the target), and their natural log-probabilities [n] where
    they were asked for."""

    tokens: list[int]
    log_probs: npt.NDArray[np.float32] | None = None


class ChainTable:
    """Where graphs leave the tokens of a chain. Close it after the graphs and before the device."""

    def __init__(self, device: ComputeDevice) -> None:
        size = (MOST_CHAIN_TOKENS,)
        self._tensors = TensorStore(device, {"tokens": ("I32", size), "log_probs": ("F32", size)})

    def add(
        self,
        builder: GraphBuilder,
        logits: Tensor,
        depth: int,
        *,
        ids: Tensor | None = None,
        probabilities: bool,
    ) -> Tensor:
        """Note the best token of logits (vocab, 1) as that of a depth, from 0, and return it, I32
        (1).

        `ids`, I32 (1, vocab), names the target's tokens where the logits are of others.
        """
        token = builder.argmax(logits)
        if probabilities:
            value = builder.pick(logits, token, 1)
            log_prob = builder.sub(value, builder.log_sum_exp(logits, value))
            builder.keep(
                builder.copy(
                    log_prob, builder.columns(Tensor(self._tensors["log_probs"]), depth, 1)
                )
            )
        if ids is not None:
            token = builder.get_rows(ids, token)
        builder.keep(
            builder.copy(token, builder.columns(Tensor(self._tensors["tokens"]), depth, 1))
        )
        return token

    def output(self, builder: GraphBuilder, n: int, *, probabilities: bool) -> None:
        """Let a graph return the first n tokens."""
        for name in ("tokens", "log_probs") if probabilities else ("tokens",):
            builder.output(name, builder.columns(Tensor(self._tensors[name]), 0, n))

    @staticmethod
    def read(graph: Graph, *, probabilities: bool) -> ChainTokens:
        """Return the chain that a graph has computed."""
        tokens: list[int] = graph.peek("tokens")[0].tolist()
        return ChainTokens(
            tokens,
            graph.read("log_probs")[0].astype(np.float32, copy=False) if probabilities else None,
        )

    def close(self) -> None:
        """Free the table."""
        self._tensors.close()


def chain_width(n: int) -> int:
    """Return the number of rows of the graph that catches up on n."""
    return next(width for width in _WIDTHS if width >= n)


Key = TypeVarTuple("Key")


class LengthGraphs(Generic[*Key]):
    """Builds graphs when they are first asked for: `build` takes the length and what else tells
    them apart."""

    def __init__(self, build: Callable[[int, *Key], Graph]) -> None:
        self._build = build
        self._graphs: dict[tuple[*Key], Graph] = {}
        self._length = (
            0  # of all graphs: a text that has outgrown one does not come back to it soon
        )

    def __len__(self) -> int:
        """Return how many graphs are kept."""
        return len(self._graphs)

    def get(self, length: int, *key: *Key) -> Graph:
        """Return the graph that reads `length` cells; those of another length are closed."""
        if length != self._length:
            self._close_graphs()
            self._length = length
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._build(length, *key)
        return graph

    def close(self) -> None:
        """Free the graphs."""
        self._close_graphs()

    def _close_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()


class ChainGraphs(LengthGraphs[int, int, bool]):
    """Builds graphs and runs them. `build` takes length, width, tokens and whether probabilities
    are returned; it writes what is drafted into `table`."""

    def __init__(
        self, device: ComputeDevice, build: Callable[[int, int, int, bool], Graph]
    ) -> None:
        super().__init__(build)
        self.table = ChainTable(device)

    @staticmethod
    def run(graph: Graph, *, probabilities: bool) -> ChainTokens:
        """Compute a graph whose inputs are filled; return its tokens."""
        graph.compute()
        return ChainTable.read(graph, probabilities=probabilities)

    def close(self) -> None:
        """Free graphs and table."""
        super().close()
        self.table.close()


class _Chains(Protocol):
    def close(self) -> None: ...


Chains = TypeVar("Chains", bound=_Chains)


class PossibleChains(Generic[Chains]):
    """Prepares chains when they are first asked for. `prepare`, and drafting with what it returns,
    may raise UnsupportedModelError: then none is asked for again."""

    def __init__(self, prepare: Callable[[], Chains]) -> None:
        self.chains: Chains | None = None
        self._prepare = prepare
        self._impossible = False

    def draft(
        self, n_rows: int, n: int, run: Callable[[Chains], ChainTokens]
    ) -> ChainTokens | None:
        """Return what `run` drafts: n tokens after `n_rows` rows; None where that is too much for
        one graph."""
        if self._impossible or n > MOST_CHAIN_TOKENS or n_rows > MOST_CHAIN_ROWS:
            return None
        try:
            if self.chains is None:
                self.chains = self._prepare()
            return run(self.chains)
        except UnsupportedModelError:
            self._impossible = True
            return None

    def close(self) -> None:
        """Free the chains."""
        if self.chains is not None:
            self.chains.close()
            self.chains = None


_GRAPH_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)


def filled_width(n: int) -> int:
    """Return the number of rows of the graph that evaluates n."""
    return next((width for width in _GRAPH_WIDTHS if width >= n), n)


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """What a head says after n rows: `tokens` and natural `log_probs`, both [n, ranks], the most
    likely first."""

    tokens: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]


def add_ranking(
    builder: GraphBuilder, logits: Tensor, ranks: int, *, probabilities: bool = True
) -> None:
    """Let a graph return what `ranked_tokens`, or without `probabilities` only `tokens_by_rank`,
    reads.

    The logits are (vocab, n), and so many of each row are returned.
    """
    tokens, values = builder.best(logits, ranks)
    builder.output("tokens", tokens)
    if probabilities:
        total = builder.log_sum_exp(logits, values if ranks == 1 else builder.columns(values, 0, 1))
        builder.output("log_probs", builder.sub(values, total))


def tokens_by_rank(graph: Graph, n: int) -> npt.NDArray[np.int32]:
    """Return the tokens [n, ranks] of the first n rows of a graph that has been computed, the most
    likely first."""
    return graph.read("tokens")[:n].astype(np.int32, copy=False)


def ranked_tokens(graph: Graph, n: int) -> RankedTokens:
    """Return the tokens of the first n rows with their log-probabilities, the most likely first."""
    return RankedTokens(
        tokens_by_rank(graph, n), graph.read("log_probs")[:n].astype(np.float32, copy=False)
    )
