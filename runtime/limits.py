"""Limits of a round's draft tree, so that neither the context nor the answer overflows."""

from __future__ import annotations

import sys

from specrun.bindings.errors import OptionError
from specrun.runtime.tree import DraftTree


class RoundLimits:
    """Says round by round how much may be drafted, and when an answer is as long as it may be.

    `n_ctx` is the context size, `max_nodes` the widest tree one evaluation takes, `max_tokens` the
    length of the answer (None: until the context is full), which begins where the first round is
    asked for. `n_max` is the most nodes that whoever asks for it wants drafted at once (None: any
    number). `max_depth` and `max_nodes` are the deepest and the largest tree of a round; none is
    deeper than it is large.
    """

    def __init__(
        self, *, n_ctx: int, max_nodes: int, max_tokens: int | None, n_max: int | None = None
    ) -> None:
        self._n_ctx = n_ctx
        self._most = max_nodes if n_max is None else min(max_nodes, n_max)
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self._end: int | None = None  # how many tokens there are where the answer ends
        self._last_free = -1  # with how many a round may draft the most for the last time
        self.max_depth = self.max_nodes = 0  # of the round that was allowed last

    def next_round(self, n_committed: int) -> bool:
        """Whether another round may start after `n_committed` tokens: `max_depth` and `max_nodes`.

        The last committed token is not cached yet, so it needs a position; then come the tree's
        nodes. The tree shrinks before the context overflows.
        """
        if n_committed <= self._last_free:
            return True  # as the round before
        if self._end is None:
            self._end = n_committed + self._max_tokens
            self._last_free = min(self._end - 1, self._n_ctx) - self._most
        left, room = self._end - n_committed, self._n_ctx - n_committed
        # Where room is 0 the last token still has its position: a round without drafts.
        if left <= 0 or room < 0:
            return False
        # A round produces at most depth + 1 tokens.
        depth = room if left > room else left - 1
        self.max_depth = depth if depth < self._most else self._most
        # Siblings share a position but not a cell: the whole tree has to fit.
        self.max_nodes = room if room < self._most else self._most
        return True

    def check(self, tree: DraftTree, drafter: str) -> None:
        """Raise if a drafter proposed more than it was allowed."""
        if len(tree) > self.max_nodes or tree.max_depth > self.max_depth:
            allowed = f"{self.max_nodes} nodes of depth {self.max_depth} were allowed"
            proposed = f"{len(tree)} nodes of depth {tree.max_depth}"
            raise OptionError(f"{drafter} proposed {proposed} where {allowed}")
