"""The state that Hydra's heads read: of the position before the last committed token, true after any rounds.

Without a prefix layer it is the target's own hidden state there. With one it is the layer's output, for which the layer
has to have seen the states of all positions before: they are cached as the text is committed, and no drafts among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.prefix import common_prefix

__all__ = ["HydraState", "StateLayer"]

_CHUNK = 64

FloatRows = npt.NDArray[np.float32]


class StateLayer(Protocol):
    """What makes states of hidden states, one after the other; `heads.prefix_layer.PrefixLayer` is one."""

    n_cells: int

    def evaluate(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """See `PrefixLayer.evaluate`."""


class HydraState:
    """Knows the text whose positions it has seen the states of, and the state of the last one.

    The layer's cells 0 to n - 1 hold the positions from `base` to the end of the known text.
    """

    def __init__(self, layer: StateLayer | None) -> None:
        self._layer = layer
        self._text: list[int] = []
        self._base = 0
        self._last: FloatRows | None = None

    @property
    def reads_all(self) -> bool:
        """Whether it wants the states of all positions; otherwise the last one is enough."""
        return self._layer is not None

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep what holds for a text as well, short of its last token: its state is still to come."""
        shared = min(common_prefix(self._text, tokens), len(tokens) - 1)
        if shared < len(self._text):
            del self._text[shared:]
            self._base = min(self._base, shared)
            self._last = None

    def learn(self, start: int, states: FloatRows, tokens: Sequence[int]) -> None:
        """Take the hidden states [n, hidden] of positions `start` on of the text `tokens`.

        What is known already stays. Where states are missing in between, the earlier ones are given up: the layer then
        sees less of the text, which costs acceptance and nothing else.
        """
        known = len(self._text)
        if start > known or start < self._base:
            self._text, self._base, self._last = list(tokens[:start]), start, None
        elif start < known:
            states = states[known - start :]
        for first in range(0, len(states), _CHUNK):
            self._add(states[first : first + _CHUNK], tokens)

    def at_end(self, tokens: Sequence[int]) -> FloatRows | None:
        """Return the state [hidden] before the last token of a text, None where it is not known."""
        known = len(self._text)
        return self._last if known == len(tokens) - 1 and self._text[-1:] == list(tokens[known - 1 : known]) else None

    def _add(self, states: FloatRows, tokens: Sequence[int]) -> None:
        position, n = len(self._text), len(states)
        if self._layer is None:
            self._last = np.array(states[-1], np.float32)
        else:
            count = position - self._base
            n = min(n, self._layer.n_cells - count)
            if n < 1:
                return
            self._last = self._layer.evaluate(states[:n], position, count)[-1]
        self._text.extend(tokens[position : position + n])
