"""Cells of a shared KV cache: which positions of which slots lie in the same cells.

A prompt's prefix that another slot has cached is shared, not evaluated again: its cells then belong
to both. How many cells are in use is counted here, because llama.cpp does not tell, and refuses an
evaluation that finds too few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple


class Run(NamedTuple):
    """Positions start <= p < end of a slot, which lie in cells of one block.

    A block's cells were filled one after the other by one text: slots that share a part of a block
    share it from its start.
    """

    block: int
    start: int
    end: int


class SlotCells:
    """The cells of one slot, as runs that cover its cached positions in order."""

    _blocks = itertools.count()

    def __init__(self) -> None:
        self._shared: list[Run] = []
        self._own = next(self._blocks)  # the block of whatever lies behind them

    def runs(self, n_cached: int) -> list[Run]:
        """Return the runs of a slot that has cached so many positions."""
        runs = [run for run in _cut(self._shared, n_cached) if run.start < run.end]
        start = self._shared[-1].end if self._shared else 0
        if n_cached > start:
            runs.append(Run(self._own, start, n_cached))
        return runs

    def cut(self, n_cached: int, length: int) -> None:
        """Note that of `n_cached` positions those from `length` on were dropped."""
        if length < n_cached:
            self._shared = [run for run in _cut(self.runs(n_cached), length) if run.start < run.end]
            # What comes next lies in other cells than what other slots may still share.
            self._own = next(self._blocks)

    def share(self, other: SlotCells, n_cached: int, length: int) -> None:
        """Note that the first `length` of another slot's `n_cached` positions are shared."""
        self._shared = [run for run in _cut(other.runs(n_cached), length) if run.start < run.end]
        self._own = next(self._blocks)


def count_cells(runs: Iterable[Run]) -> int:
    """Return how many cells the runs of all slots lie in."""
    sizes: dict[int, int] = {}
    for block, start, end in runs:
        sizes[block] = max(sizes.get(block, 0), end - start)
    return sum(sizes.values())


def _cut(runs: Iterable[Run], length: int) -> list[Run]:
    return [Run(block, start, min(end, length)) for block, start, end in runs]
