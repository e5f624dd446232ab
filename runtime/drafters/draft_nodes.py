"""The draft nodes of a round that an EAGLE head has evaluated: what was predicted at each, and what each sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["DraftNodes"]

FloatRows = npt.NDArray[np.float32]
_NODES = 32  # for which there is room at first


class DraftNodes:
    """The draft nodes of a round: the states predicted at them, and which nodes each sees, itself among them.

    Row 0 stands for the last token of the text, so node i is row i + 1, and ROOT row 0.
    """

    def __init__(self, root: FloatRows) -> None:
        self._n = 0
        self._states = np.zeros((_NODES + 1, len(root)), root.dtype)
        self._states[0] = root
        self._sees = np.zeros((_NODES + 1, _NODES), np.bool_)

    def __len__(self) -> int:
        return self._n

    def add(self, parents: Sequence[int]) -> tuple[FloatRows, npt.NDArray[np.bool_]]:
        """Add nodes below others; return the states they read [n, hidden] and the nodes they see [n, nodes]."""
        first, n = self._n, len(parents)
        end = first + n
        if end > self._sees.shape[1]:
            more = max(end, 2 * self._sees.shape[1])
            self._states = np.pad(self._states, ((0, more + 1 - len(self._states)), (0, 0)))
            self._sees = np.pad(self._sees, ((0, more + 1 - len(self._sees)), (0, more - self._sees.shape[1])))
        rows = np.array(parents) + 1
        self._sees[first + 1 : end + 1] = self._sees[rows]
        own = np.arange(first, end)
        self._sees[own + 1, own] = True
        self._n = end
        return self._states[rows], self._sees[first + 1 : end + 1, :end]

    def predicted(self, states: FloatRows) -> None:
        """Note the states predicted at the nodes that were added last."""
        self._states[self._n + 1 - len(states) : self._n + 1] = states
