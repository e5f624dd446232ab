"""The cache of a draft model that spells the target's tokens with tokens of its own.

A committed token may be several of the drafter's, so that its cells are counted apart from the
tokens. What it drafts are shared tokens, one cell each: trees grow as those of any draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from specrun.bindings.context import Context
from specrun.runtime.drafters.draft_model.state import DraftModelState, DraftTreeState
from specrun.runtime.drafters.draft_model.token_map import TokenMap
from specrun.runtime.transform import Logits


class SpelledModelState(DraftModelState):
    """Evaluates committed tokens of the target as the drafter's own, and maps its rows back.

    `cached` are the target's tokens; `cells(n)` says how many cells the first n of them have.
    """

    def __init__(self, context: Context, tokens: TokenMap) -> None:
        super().__init__(context, target_vocab_size=context.model.vocabulary.size)
        self._map = tokens
        self._ends: list[int] = []  # of cached tokens, and maybe of some that were cut since

    def cells(self, length: int) -> int:
        """Return how many cells hold the first `length` cached tokens."""
        while len(self._ends) < length:  # drafted tokens, one cell each
            self._ends.append(1 + (self._ends[-1] if self._ends else len(self._map.first)))
        return self._ends[length - 1] if length else 0

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind a text whose first tokens are cached."""
        n_cached = len(self.cached)
        new = sum(len(self._map.spelled(token)) for token in tokens[n_cached:])
        start = 0 if n_cached else len(self._map.first)
        return self.context.n_ctx - self.cells(n_cached) - start - new

    def known(self, token: int) -> int:
        """Return the drafter's token for a shared one."""
        return self._map.spelled(token)[0]

    def shared(self, logits: Logits) -> Logits:
        """Return a row by the target's ids, -inf where the drafter has no such token."""
        return self._map.row(logits)

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after the cached ones; return the last one's logits [target vocab]."""
        start = self.cells(len(self.cached))
        del self._ends[len(self.cached) :]
        spelled = [self._map.spelled(token) for token in tokens]
        if not self.cached and spelled[0] != self._map.first:
            spelled[0] = (*self._map.first, *spelled[0])
        ids = [token for several in spelled for token in several]
        n_batch = self.context.n_batch
        self._changing = True
        for begin in range(0, len(ids), n_batch):
            piece = ids[begin : begin + n_batch]
            self.batch.fill_chain(piece, start + begin, (self.main,), 1)
            rows = self.context.decode(self.batch)
        self._ends += [*accumulate(map(len, spelled), initial=start)][1:]
        self.cached.extend(tokens)
        self._changing = False
        return self.shared(rows.logits(0))

    def feed_one(self, token: int) -> Logits:
        """Evaluate a token after the cached ones; return its logits [target vocab]."""
        return self.feed((token,))

    def feed_likeliest(self, token: int, most: int, ends: frozenset[int]) -> list[int] | None:
        """Return None: compiled code reads the drafter's own ids."""
        return None


class SpelledTreeState(SpelledModelState, DraftTreeState):
    """The same, and below the last committed token the nodes of a growing tree."""

    def __init__(self, context: Context, tokens: TokenMap) -> None:
        super().__init__(context, tokens)

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep the nodes that spell the beginning of `tokens`, now committed; drop the others."""
        del self._ends[len(self.cached) :]  # of tokens that were cut: the new ones have one cell
        super().keep(tokens)
