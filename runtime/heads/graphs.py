"""Graphs of heads on ggml: best tokens by rank, greedy chains in one graph, and their reuse.

Reading a whole row of logits back from the device costs more than a small head computes. So top-k
and log-sum-exp are part of a head's graph, and only `ranks` numbers of each row leave the device.

A greedy chain goes further: the best token of each depth is found and fed to the next depth inside
the graph. Tokens are left in a table that outlives the graph, so that a whole chain comes back in
one read. Whether ggml's backends can do this is asked when a graph is built, and
`UnsupportedModelError` says that one cannot: the chain is then drafted depth by depth.

A graph has a fixed number of rows. A few sizes serve all batches: rows are filled up to the next
one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.ggml import ComputeDevice, Graph, GraphBuilder, Tensor, TensorStore
from specrun.runtime.drafter import Owned

MOST_CHAIN_TOKENS = 64
"""The longest chain of one graph."""

_CHAIN_WIDTHS = (1, 1, 2, 4, 4, 8, 8, 8, 8)  # by rows; few, as each is a graph of all depths
MOST_CHAIN_ROWS = len(_CHAIN_WIDTHS) - 1
"""The most rows that a chain's graph catches up on before it drafts."""
chain_width = _CHAIN_WIDTHS.__getitem__
"""Returns the number of rows of the chain's graph that catches up on so many."""

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)


def filled_width(n: int) -> int:
    """Return the number of rows of the graph that evaluates n."""
    return n if n > _WIDTHS[-1] else _WIDTHS[bisect_left(_WIDTHS, n)]


def first_rows(rows: npt.NDArray[np.float32], n: int) -> npt.NDArray[np.float32]:
    """Return a copy of the first n rows."""
    return rows.copy() if len(rows) == n else rows[:n].copy()


class Timed(Protocol):
    """A device, or heads on one."""

    @property
    def native_seconds(self) -> float:
        """Seconds in native evaluation so far."""


class NativeShare:
    """Counts the native `seconds` of a `device` inside its `with` blocks; they do not nest.

    So each of the conversations that share a head knows the native time that it caused itself.
    """

    def __init__(self, device: Timed) -> None:
        self.seconds = 0.0
        self.device = device
        self._before = 0.0

    def __enter__(self) -> None:
        self._before = self.device.native_seconds

    def __exit__(self, *_: object) -> None:
        self.seconds += self.device.native_seconds - self._before


# -- best tokens by rank ---------------------------------------------------------------------------


@dataclass(slots=True)
class RankedTokens:
    """A head's best tokens after n rows: `tokens` and natural `log_probs`, both [n, ranks]."""

    tokens: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]


def add_ranking(
    builder: GraphBuilder, logits: Tensor, ranks: int, *, probabilities: bool = True
) -> None:
    """Let a graph return the best `ranks` tokens of each row of logits (vocab, n).

    `ranked_tokens` reads them, or `tokens_by_rank` those of a graph without `probabilities`.
    """
    tokens, values = builder.best(logits, ranks)
    builder.output("tokens", tokens)
    if probabilities:
        total = builder.log_sum_exp(logits, (tokens, values))
        builder.output("log_probs", builder.sub(values, total))


def tokens_by_rank(graph: Graph, n: int) -> npt.NDArray[np.int32]:
    """Return the tokens [n, ranks] of the first n rows of a computed graph, the best first."""
    return graph.peek("tokens")[:n].astype(np.int32)


def ranked_tokens(graph: Graph, n: int) -> RankedTokens:
    """Return the tokens of the first n rows with their log-probabilities, the best first."""
    log_probs = graph.floats("log_probs")[:n].copy()
    return RankedTokens(tokens_by_rank(graph, n), log_probs)


# -- graphs over a cache, and those of greedy chains -----------------------------------------------

Key = TypeVarTuple("Key")


class LengthGraphs(Generic[*Key]):
    """Graphs over a cache that are kept to be run again: all read the same number of its cells.

    `build` makes one when it is first asked for, from the length and what else tells them apart.
    """

    def __init__(self, build: Callable[[int, *Key], Graph]) -> None:
        self._build = build
        self._graphs: dict[tuple[*Key], Graph] = {}
        self._length = 0

    def __len__(self) -> int:
        """Return how many graphs are kept."""
        return len(self._graphs)

    def get(self, length: int, key: tuple[*Key]) -> Graph:
        """Return the graph that reads `length` cells; those of another length are closed."""
        if length != self._length:  # a text that has outgrown one does not come back to it soon
            LengthGraphs.close(self)
            self._length = length
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._build(length, *key)
        return graph

    def close(self) -> None:
        """Free the graphs."""
        while self._graphs:
            self._graphs.popitem()[1].close()


@dataclass(slots=True)
class ChainTokens:
    """A greedy chain: tokens of the target, and natural log-probabilities [n] if asked for."""

    tokens: list[int]
    log_probs: npt.NDArray[np.float32] | None = None


class ChainGraphs(LengthGraphs[int, int, bool]):
    """The graphs of greedy chains, and the table in which they leave their tokens.

    `build` takes length, width, the number of tokens and whether probabilities are returned; it
    adds every depth with `add` and ends with `output`. Close it before the device.
    """

    def __init__(
        self, device: ComputeDevice, build: Callable[[int, int, int, bool], Graph]
    ) -> None:
        super().__init__(build)
        size = (MOST_CHAIN_TOKENS,)
        self._table = TensorStore(device, {"tokens": ("I32", size), "log_probs": ("F32", size)})

    def add(
        self,
        builder: GraphBuilder,
        logits: Tensor,
        depth: int,
        *,
        ids: Tensor | None = None,
        probabilities: bool,
    ) -> Tensor:
        """Note the best token of logits (vocab, 1) as that of a depth, from 0; return it, I32 (1).

        `ids`, I32 (1, vocab), names the target's tokens where the logits are of others.
        """
        token = builder.argmax(logits)
        if probabilities:
            value = builder.pick(logits, token, 1)
            total = builder.log_sum_exp(logits, (builder.reshape(token, 1, 1), value))
            self._note(builder, "log_probs", depth, builder.sub(value, total))
        # Draft vocabularies (EAGLE-3): what is fed on and returned is the target's token.
        if ids is not None:
            token = builder.get_rows(ids, token)
        self._note(builder, "tokens", depth, token)
        return token

    def _note(self, builder: GraphBuilder, name: str, depth: int, value: Tensor) -> None:
        place = builder.columns(Tensor(self._table[name]), depth, 1)
        # Without keep, nothing downstream reads the copy, and ggml would leave it out of the graph.
        builder.keep(builder.copy(value, place))

    def output(self, builder: GraphBuilder, n: int, *, probabilities: bool) -> None:
        """Let a graph return the first n tokens."""
        for name in ("tokens", "log_probs") if probabilities else ("tokens",):
            builder.output(name, builder.columns(Tensor(self._table[name]), 0, n))

    @staticmethod
    def run(graph: Graph, *, probabilities: bool) -> ChainTokens:
        """Compute a graph whose inputs are filled; return its tokens."""
        graph.compute()
        [tokens] = graph.numbers("tokens")
        if not probabilities:
            return ChainTokens(tokens)
        return ChainTokens(tokens, graph.floats("log_probs")[0].copy())

    def close(self) -> None:
        """Free graphs and table."""
        super().close()
        self._table.close()


Graphs = TypeVar("Graphs", bound=Owned)
Drafted = TypeVar("Drafted")
Given = TypeVar("Given")


class PossibleGraphs(Generic[Graphs]):
    """The graphs of a head's whole drafts, where its backends can compute them: found out once.

    `prepare` makes them when they are first asked for. It, and drafting with what it returns, may
    raise UnsupportedModelError: then none is asked for again. Their time goes into `share`.
    """

    def __init__(self, prepare: Callable[[], Graphs], share: NativeShare) -> None:
        self.graphs: Graphs | None = None
        self._prepare, self._share = prepare, share
        self._impossible = False

    def draft(
        self, n_rows: int, depth: int, run: Callable[[Graphs, Given], Drafted], given: Given
    ) -> Drafted | None:
        """Return the draft, `depth` tokens deep, that `run` makes after `n_rows` rows.

        It is a method of the graphs, which get what is given. None if one graph cannot.
        """
        if self._impossible or depth > MOST_CHAIN_TOKENS or n_rows > MOST_CHAIN_ROWS:
            return None
        # Added up here, not by a `with` block: its two calls would be made in every round.
        share, before = self._share, self._share.device.native_seconds
        try:
            if self.graphs is None:
                self.graphs = self._prepare()
            return run(self.graphs, given)
        except UnsupportedModelError:
            self._impossible = True
            return None
        finally:
            share.seconds += share.device.native_seconds - before

    def close(self) -> None:
        """Free the graphs."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
