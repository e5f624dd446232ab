"""The graphs of chains that are kept: all of one length of the cache, by rows before the chain and words in it."""

from __future__ import annotations

from collections.abc import Callable

from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.graph import Graph
from specrun.runtime.heads.chain_words import ChainTable, ChainWords

__all__ = ["ChainGraphs"]


class ChainGraphs:
    """Builds graphs when they are first asked for, and runs them. `build` takes width, words, length, and whether
    probabilities are returned; it writes what is drafted into `table`."""

    def __init__(self, device: ComputeDevice, build: Callable[[int, int, int, bool], Graph]) -> None:
        self.table = ChainTable(device)
        self._build = build
        self._graphs: dict[tuple[int, int, bool], Graph] = {}
        self._length = 0  # of all graphs: a text that has outgrown one does not come back to it soon

    def __len__(self) -> int:
        """Return how many graphs are kept."""
        return len(self._graphs)

    def get(self, width: int, n: int, length: int, *, probabilities: bool) -> Graph:
        """Return the graph of n words after `width` rows that reads `length` cells."""
        if length != self._length:
            self._close_graphs()
            self._length = length
        graph = self._graphs.get((width, n, probabilities))
        if graph is None:
            graph = self._graphs[width, n, probabilities] = self._build(width, n, length, probabilities)
        return graph

    def run(self, graph: Graph, *, probabilities: bool) -> ChainWords:
        """Compute a graph whose inputs are filled; return its words."""
        graph.compute()
        return ChainTable.read(graph, probabilities=probabilities)

    def close(self) -> None:
        """Free graphs and table."""
        self._close_graphs()
        self.table.close()

    def _close_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()
