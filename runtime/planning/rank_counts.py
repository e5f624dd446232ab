"""Counting at which rank the right word was among the guesses of each depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.runtime.heads.node_accuracy import Accuracy

__all__ = ["RankCounts"]

Counts = npt.NDArray[np.int64]


class RankCounts:
    """Counts at which rank each depth's right word was, of `depths` depths and `ranks` ranks."""

    def __init__(self, depths: int, ranks: int) -> None:
        self.n_positions = 0
        self._alone: Counts = np.zeros((depths, ranks), np.int64)
        self._below: Counts = np.zeros((depths, ranks), np.int64)
        self._asked: Counts = np.zeros(depths, np.int64)
        self._reached: Counts = np.zeros(depths, np.int64)

    def add(self, guesses: Sequence[Sequence[int]], right: Sequence[int]) -> None:
        """Count one position: the words of each depth, and the words that came."""
        self.n_positions += 1
        on_path = True
        for depth, (words, word) in enumerate(zip(guesses, right, strict=False)):
            self._asked[depth] += 1
            self._reached[depth] += on_path
            rank = next((place for place, one in enumerate(words) if one == word), None)
            if rank is not None and rank < self._alone.shape[1]:
                self._alone[depth, rank] += 1
                self._below[depth, rank] += on_path
            else:
                on_path = False

    @property
    def accuracy(self) -> Accuracy:
        """Shares by depth and rank, of the positions where the words above were guessed."""
        return _shares(self._below, self._reached)

    @property
    def alone(self) -> Accuracy:
        """Shares by depth and rank, of all positions."""
        return _shares(self._alone, self._asked)

    @property
    def n_asked(self) -> tuple[int, ...]:
        """At how many positions each depth had a word to guess."""
        return tuple(self._asked.tolist())

    @property
    def n_reached(self) -> tuple[int, ...]:
        """At how many positions the words above each depth were guessed."""
        return tuple(self._reached.tolist())


def _shares(counts: Counts, totals: Counts) -> Accuracy:
    shares = counts / np.maximum(totals, 1)[:, None]
    return tuple(tuple(row) for row in shares.tolist())
