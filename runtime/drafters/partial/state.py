"""A bounded cache of the target's own weights: the first tokens of a text and the last ones.

Positions are those within the cache (StreamingLLM, Xiao et al. 2023, section 3.2): the kept tokens
stand side by side, so that no position exceeds the bound, however long the text is. Their keys and
values are those of the kept tokens alone, evaluated again whenever the window moves: what the cache
says is what the model says of the shortened text (sliding window with re-computation, section 1),
and where it has been before does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.context import Context
from specrun.runtime.drafters.draft_model.state import DraftModelState, DraftTreeState
from specrun.runtime.drafters.partial.window import Window
from specrun.runtime.transform import Logits


class PartialState(DraftModelState):
    """Evaluates texts of any length in a cache of a few cells: what `window` keeps.

    `cached` are all tokens of the text that were read; `cells(n)` says how many of the first n the
    cache holds. The window moves only where a round begins (`feed`), never within a draft.
    """

    def __init__(self, context: Context, window: Window) -> None:
        super().__init__(context, target_vocab_size=context.model.vocabulary.size)
        self._window, self._first = window, window.sink
        self.n_text = 0  # the tokens of the text, those before the window included

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what a text shares with the last one."""
        super().begin(tokens)
        self.n_text = len(tokens)

    def cells(self, length: int) -> int:
        """Return how many cells hold what is kept of the first `length` cached tokens."""
        return self._window.cells(length, self._first)

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind what is kept of a text."""
        n, window = len(tokens), self._window
        return self.context.n_ctx - window.cells(n, window.first_kept(n))

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after the cached ones; return the last one's logits, a view [vocab].

        Where the window moves, what it keeps is evaluated anew.
        """
        n_cached, sink = len(self.cached), self._window.sink
        first = self._window.first_kept(n_cached + len(tokens))
        kept = read = tokens
        # Of a text that was cut to before its window nothing is left in it.
        if first != self._first or first > max(n_cached, sink):
            whole = [*self.cached, *tokens]
            n_cached = min(n_cached, sink)
            self.rewind(n_cached)
            self._first, read = first, whole[n_cached:]
            kept = [*whole[n_cached:sink], *whole[first:]]
        start, n_batch = self.cells(n_cached), self.context.n_batch
        self._changing = True
        for begin in range(0, len(kept), n_batch):
            piece = [self.known(token) for token in kept[begin : begin + n_batch]]
            self.batch.fill_chain(piece, start + begin, (self.main,), 1)
            rows = self.context.decode(self.batch)
        self.cached.extend(read)
        self.n_text = len(self.cached)
        self._changing = False
        return self.shared(rows.logits(0))


class PartialTreeState(PartialState, DraftTreeState):
    """The same, and below the last committed token the nodes of a growing tree."""
