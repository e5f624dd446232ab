"""Graphs over a cache that are kept to be run again: all of them read the same number of its cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVarTuple

from specrun.bindings.ggml.graph import Graph

__all__ = ["LengthGraphs"]

Key = TypeVarTuple("Key")


class LengthGraphs(Generic[*Key]):
    """Builds graphs when they are first asked for: `build` takes the length and what else tells them apart."""

    def __init__(self, build: Callable[[int, *Key], Graph]) -> None:
        self._build = build
        self._graphs: dict[tuple[*Key], Graph] = {}
        self._length = 0  # of all graphs: a text that has outgrown one does not come back to it soon

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
