"""Limits of a round's draft tree, so that neither the context nor the answer overflows."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.tree import DraftTree


@dataclass(slots=True)
class Allowance:
    """The deepest and the largest tree of one round."""

    # Not frozen: that costs a call for every field, in every round.
    max_depth: int
    max_nodes: int

    def check(self, tree: DraftTree, drafter: str) -> None:
        """Raise if a drafter proposed more than it was allowed."""
        n_nodes = len(tree.tokens)
        if n_nodes <= self.max_depth and n_nodes <= self.max_nodes:  # no tree is deeper than large
            return
        if n_nodes > self.max_nodes or tree.max_depth > self.max_depth:
            allowed = f"{self.max_nodes} nodes of depth {self.max_depth} were allowed"
            proposed = f"{len(tree)} nodes of depth {tree.max_depth}"
            raise OptionError(f"{drafter} proposed {proposed} where {allowed}")


class RoundLimits:
    """Counts down an answer's tokens and the context's positions.

    `n_ctx` is the context size, `max_nodes` the widest tree one evaluation takes, `max_tokens` the
    length of the answer (None: until the context is full), `n_max` the most nodes that whoever asks
    for it wants drafted at once (None: any number).
    """

    def __init__(
        self, *, n_ctx: int, max_nodes: int, max_tokens: int | None, n_max: int | None = None
    ) -> None:
        self._n_ctx = n_ctx
        self._max_nodes = max_nodes if n_max is None else min(max_nodes, n_max)
        self._max_depth = n_ctx if n_max is None else n_max
        self._left = max_tokens
        self.context_full = False

    def next_round(self, n_committed: int) -> Allowance | None:
        """Return what the next round may draft after `n_committed` tokens; None: it may not start.

        The last committed token is not cached yet, so it needs a position; then come the tree's
        nodes. The tree shrinks before the context overflows.
        """
        if self._left is not None and self._left <= 0:
            return None
        room = self._n_ctx - n_committed
        # At 0 the last token still has its position: a round without drafts.
        if room < 0:
            self.context_full = True
            return None
        # A round produces at most depth + 1 tokens.
        depth = room if self._left is None or self._left > room else self._left - 1
        if depth > self._max_depth:
            depth = self._max_depth
        # Siblings share a position but not a cell: the whole tree has to fit.
        return Allowance(depth, room if room < self._max_nodes else self._max_nodes)

    def spend(self, n_tokens: int) -> None:
        """Count the tokens a round produced."""
        if self._left is not None:
            self._left -= n_tokens
