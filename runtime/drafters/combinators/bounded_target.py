"""TriForce's middle (Sun et al. 2024): the target's weights verify drafts in a bounded cache.

In `cascade(partial(...), b)` the target itself decodes speculatively with what its window keeps,
and what it emits is verified with the whole text. So b's cheap drafts are checked by all weights
without the keys and values of a long text, and only what passed reads those.
"""

from __future__ import annotations

from specrun.bindings.context import Context
from specrun.runtime.drafters.combinators.cascade import DraftModelTarget
from specrun.runtime.drafters.partial import PartialCache
from specrun.runtime.target import CachedText, PromptLearner, TargetModel


class BoundedTarget(DraftModelTarget):
    """Evaluates trees below texts of any length, of which its cache holds what a window keeps.

    `text.n_cached` counts the tokens that were read, dropped ones included. The window moves where
    a draft begins, never within it.
    """

    def __init__(self, context: Context, cache: PartialCache) -> None:
        super().__init__(context, target_vocab_size=context.model.vocabulary.size)
        self._cache, self._window = cache, cache.window
        self._first = cache.window.sink

    @property
    def n_ctx(self) -> int:
        """The most tokens that a text may have."""
        return self._cache.n_ctx

    def prefill(self, text: CachedText, end: int, learn: PromptLearner | None = None) -> None:
        """Evaluate what is kept of the text up to `end`, unless so little that it joins a tree."""
        first, sink = self._window.first_kept(len(text.tokens)), self._window.sink
        if first != self._first or first > max(text.n_cached, sink):
            # Before the cache: what is said to be there must be there.
            text.n_cached = min(text.n_cached, sink)
            self.context.memory.truncate(text.n_cached)
            self._first = first
            if first > sink:
                TargetModel.prefill(self, text, sink)  # however few are missing
                text.n_cached = first  # those in between are dropped
        super().prefill(text, end, learn)

    def _cell(self, index: int) -> int:
        return self._window.cells(index, self._first)

    def _index(self, cell: int) -> int:
        return self._window.tokens(cell, self._first)
