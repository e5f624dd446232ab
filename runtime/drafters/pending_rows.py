"""States of the target that a head has been shown and has not evaluated yet.

A head that waits until it is asked to draft evaluates them together with the draft, or many of them at once where
nothing was drafted for some rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["PendingRows", "copied_rows"]

FloatRows = npt.NDArray[np.float32]


class PendingRows:
    """Rows in order, first in, first out."""

    def __init__(self) -> None:
        self._pieces: list[FloatRows] = []
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, rows: FloatRows) -> None:
        """Append rows [n, ...], which nobody may change any more."""
        if len(rows):
            self._pieces.append(rows)
            self._n += len(rows)

    def first(self, n: int) -> FloatRows:
        """Return the first n rows, or all if there are fewer: they stay until they are dropped."""
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0][:n]

    def drop(self, n: int) -> None:
        """Remove the first n rows."""
        rest = self.first(self._n)[n:] if n < self._n else None
        self._pieces, self._n = [], 0
        if rest is not None:
            self.add(rest)

    def keep(self, n: int) -> None:
        """Drop all but the first n rows."""
        if n < self._n:
            kept = self.first(n) if n > 0 else None
            self._pieces, self._n = [], 0
            if kept is not None:
                self.add(kept)


def copied_rows(views: Sequence[FloatRows]) -> FloatRows:
    """Return a copy [n, ...] of rows that die with the next evaluation."""
    # One row is what most rounds have, and several times as quick as a stack of one.
    return np.array(views[0], np.float32, ndmin=2) if len(views) == 1 else np.stack(views)
