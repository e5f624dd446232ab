"""The words of a greedy chain as part of a graph: each depth's best word is found and fed on inside the graph.

A word is left in a table that outlives the graph, so a whole chain comes back in one read. Which words ggml's backends
can do this for is asked when a graph is built: `UnsupportedModelError` says that one cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.graph import Graph, GraphBuilder, Tensor
from specrun.bindings.ggml.weights import TensorStore

__all__ = ["MOST_CHAIN_ROWS", "MOST_CHAIN_WORDS", "ChainTable", "ChainWords", "chain_width"]

MOST_CHAIN_WORDS = 64
"""The longest chain of one graph."""

_WIDTHS = (1, 2, 4, 8)  # few, because each is a graph of all depths
MOST_CHAIN_ROWS = _WIDTHS[-1]
"""The most rows that a chain's graph catches up on before it drafts."""


@dataclass(frozen=True, slots=True)
class ChainWords:
    """A greedy chain: its words (of the target), and their natural log-probabilities [n] where they were asked for."""

    words: list[int]
    log_probs: npt.NDArray[np.float32] | None = None


class ChainTable:
    """Where graphs leave the words of a chain. Close it after the graphs and before the device."""

    def __init__(self, device: ComputeDevice) -> None:
        size = (MOST_CHAIN_WORDS,)
        self._tensors = TensorStore(device, {"words": ("I32", size), "log_probs": ("F32", size)})

    def add(
        self, builder: GraphBuilder, logits: Tensor, depth: int, *, ids: Tensor | None = None, probabilities: bool
    ) -> Tensor:
        """Note the best word of logits (words, 1) as that of a depth, from 0, and return it, I32 (1).

        `ids`, I32 (1, words), names the target's words where the logits are of others.
        """
        word = builder.argmax(logits)
        if probabilities:
            value = builder.pick(logits, word, 1)
            log_prob = builder.sub(value, builder.log_sum_exp(logits, value))
            builder.keep(builder.copy(log_prob, builder.columns(Tensor(self._tensors["log_probs"]), depth, 1)))
        if ids is not None:
            word = builder.get_rows(ids, word)
        builder.keep(builder.copy(word, builder.columns(Tensor(self._tensors["words"]), depth, 1)))
        return word

    def output(self, builder: GraphBuilder, n: int, *, probabilities: bool) -> None:
        """Let a graph return the first n words."""
        for name in ("words", "log_probs") if probabilities else ("words",):
            builder.output(name, builder.columns(Tensor(self._tensors[name]), 0, n))

    @staticmethod
    def read(graph: Graph, *, probabilities: bool) -> ChainWords:
        """Return the chain that a graph has computed."""
        words: list[int] = graph.peek("words")[0].tolist()
        return ChainWords(words, graph.read("log_probs")[0].astype(np.float32, copy=False) if probabilities else None)

    def close(self) -> None:
        """Free the table."""
        self._tensors.close()


def chain_width(n: int) -> int:
    """Return the number of rows of the graph that catches up on n."""
    return next(width for width in _WIDTHS if width >= n)
