"""The state that Hydra's heads read: of the position before the last committed token, true after any rounds.

Without a prefix layer it is the target's own hidden state there. With one it is the layer's output, for which the layer
has to have seen the states of all positions before: they are cached as the text is committed, and no drafts among them.
They wait until the heads are asked to draft: a chain's graph evaluates them with the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.pending_rows import PendingRows
from specrun.runtime.heads.chain_words import MOST_CHAIN_ROWS, ChainWords
from specrun.runtime.prefix import common_prefix

__all__ = ["DraftsChains", "HydraState", "StateLayer"]

_CHUNK = 64

FloatRows = npt.NDArray[np.float32]


class StateLayer(Protocol):
    """What makes states of hidden states, one after the other; `heads.prefix_layer.PrefixLayer` is one."""

    n_cells: int

    def evaluate(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """See `PrefixLayer.evaluate`."""


class DraftsChains(Protocol):
    """What drafts a whole chain at once; `heads.hydra_head.HydraHead` does."""

    def chain(
        self, states: FloatRows, position: int, count: int, token: int, n: int, *, probabilities: bool = False
    ) -> ChainWords | None:
        """See `HydraHead.chain`."""


class HydraState:
    """Knows the text whose positions it has been shown the states of, and the state of the last one.

    The layer's cells 0 to `count - 1` hold the positions from `base` on; the rest of the known text is pending.
    """

    def __init__(self, layer: StateLayer | None) -> None:
        self._layer = layer
        self._text: list[int] = []
        self._base = 0
        self._pending = PendingRows()
        self._newest: FloatRows | None = None  # the hidden state [1, hidden] of the last position that is in a cell
        self._last: FloatRows | None = None

    @property
    def reads_all(self) -> bool:
        """Whether it wants the states of all positions; otherwise the last one is enough."""
        return self._layer is not None

    @property
    def _count(self) -> int:
        return len(self._text) - self._base - len(self._pending)

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep what holds for a text as well, short of its last two tokens.

        The last one's state is still to come, and that of the one before is shown again: the first draft needs it.
        """
        shared = max(0, min(common_prefix(self._text, tokens), len(tokens) - 2))
        if shared < len(self._text):
            count = self._count
            del self._text[shared:]
            self._base = min(self._base, shared)
            self._pending.keep(max(0, shared - self._base - count))
            self._newest = self._last = None

    def learn(self, start: int, states: FloatRows, tokens: Sequence[int]) -> None:
        """Take the hidden states [n, hidden] of positions `start` on of the text `tokens`.

        What is known already stays. Where states are missing in between, the earlier ones are given up: the layer then
        sees less of the text, which costs acceptance and nothing else.
        """
        known = len(self._text)
        if start > known or start < self._base:
            self._pending.keep(0)
            self._text, self._base, self._last, known = list(tokens[:start]), start, None, start
        elif start < known:
            states = states[known - start :]
        if self._layer is None:
            if len(states):
                self._last = np.array(states[-1], np.float32)
        else:
            states = states[: max(0, self._layer.n_cells - (known - self._base))]
            self._pending.add(states)
        self._text.extend(tokens[known : known + len(states)])
        while self._layer is not None and len(self._pending) > _CHUNK:
            self._evaluate(self._layer, _CHUNK)

    def at_end(self, tokens: Sequence[int]) -> FloatRows | None:
        """Return the state [hidden] before the last token of a text, None where it is not known."""
        if not self._is_known(tokens):
            return None
        if self._layer is not None:
            if self._last is None:
                self._return_newest()
            while self._pending:
                self._evaluate(self._layer, _CHUNK)
        return self._last

    def chain(self, heads: DraftsChains, tokens: Sequence[int], n: int) -> ChainWords | None:
        """Return n words of a greedy chain after the last token of a text, evaluated at once.

        None where the state before it is not known, or the heads have no graph for it.
        """
        if not self._is_known(tokens):
            return None
        if self._layer is None:
            return None if self._last is None else heads.chain(self._last[None], 0, 0, tokens[-1], n)
        self._return_newest()
        while len(self._pending) > MOST_CHAIN_ROWS:
            self._evaluate(self._layer, min(_CHUNK, len(self._pending) - 1))
        waiting = len(self._pending)
        if not waiting:
            return None
        count, states = self._count, self._pending.first(waiting)
        words = heads.chain(states, self._base + count, count, tokens[-1], n)
        if words is None:
            return None
        self._pending.drop(waiting)
        self._newest, self._last = states[-1:], None
        return words

    def _is_known(self, tokens: Sequence[int]) -> bool:
        known = len(self._text)
        return known == len(tokens) - 1 and self._text[-1:] == list(tokens[known - 1 : known])

    def _return_newest(self) -> None:
        """Have the last position evaluated once more, where none is pending: what came of it is needed again."""
        if not self._pending and self._newest is not None:
            self._pending.add(self._newest)
            self._newest = None

    def _evaluate(self, layer: StateLayer, n: int) -> None:
        """Put the first n pending positions into cells."""
        count, states = self._count, self._pending.first(n)
        self._last = layer.evaluate(states, self._base + count, count)[-1]
        self._pending.drop(n)
        self._newest = states[-1:]
