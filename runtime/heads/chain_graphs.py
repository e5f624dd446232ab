"""The graphs of chains: by rows before the chain, words in it, and whether probabilities are returned."""

from __future__ import annotations

from collections.abc import Callable

from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.graph import Graph
from specrun.runtime.heads.chain_words import ChainTable, ChainWords
from specrun.runtime.heads.length_graphs import LengthGraphs

__all__ = ["ChainGraphs"]


class ChainGraphs(LengthGraphs[int, int, bool]):
    """Builds graphs and runs them. `build` takes length, width, words and whether probabilities are returned; it writes
    what is drafted into `table`."""

    def __init__(self, device: ComputeDevice, build: Callable[[int, int, int, bool], Graph]) -> None:
        super().__init__(build)
        self.table = ChainTable(device)

    @staticmethod
    def run(graph: Graph, *, probabilities: bool) -> ChainWords:
        """Compute a graph whose inputs are filled; return its words."""
        graph.compute()
        return ChainTable.read(graph, probabilities=probabilities)

    def close(self) -> None:
        """Free graphs and table."""
        super().close()
        self.table.close()
