"""TriForce's middle (Sun et al. 2024): the target's weights verify drafts in a bounded cache.

In `cascade(partial(...), b)` the target itself decodes speculatively with what its window keeps,
and what it emits is verified with the whole text. So b's cheap drafts are checked by all weights
without the keys and values of a long text, and only what passed reads those.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.contexts.context import Context
from specrun.runtime.drafter import RoundOutcome
from specrun.runtime.drafters.combinators.cascade import DraftModelTarget
from specrun.runtime.drafters.partial import PartialCache
from specrun.runtime.target import CachedText, EvaluatedRows, PromptLearner, TargetModel


class BoundedTarget(DraftModelTarget):
    """Evaluates trees below texts of any length, of which its cache holds what a window keeps.

    `text.n_cached` counts the tokens that were read, dropped ones included. The window moves where
    a draft begins, never within it.
    """

    def __init__(self, context: Context, cache: PartialCache) -> None:
        super().__init__(context, target_vocab_size=context.model.vocabulary.size)
        self._cache, self._kept = cache, cache.kept()

    @property
    def n_ctx(self) -> int:
        """The most tokens that a text may have."""
        return self._cache.n_ctx

    def begin(self, tokens: Sequence[int]) -> None:
        """Turn to another text of the whole target's: what is shared stays known."""
        if self._kept.chunks is not None:
            self._kept.chunks.begin(tokens)

    def prefill(self, text: CachedText, end: int, learn: PromptLearner | None = None) -> None:
        """Evaluate what is kept of the text up to `end`, unless so little that it joins a tree."""
        kept, sink = self._kept, self._kept.window.sink
        if kept.is_to_move(len(text.tokens), text.n_cached):
            # Before the cache: what is said to be there must be there.
            text.n_cached = min(text.n_cached, sink)
            self.context.memory.truncate(text.n_cached)
            kept.move(len(text.tokens))
            if kept.first > sink:
                TargetModel.prefill(self, text, sink)  # however few are missing
                self._evaluate_chunks(text)
                text.n_cached = kept.first  # the others in between are dropped
        super().prefill(text, end, learn)

    def _evaluate_chunks(self, text: CachedText) -> None:
        """Evaluate the chosen tokens between sink and window."""
        tokens = [text.tokens[place] for place in self._kept.between]
        sink = self._kept.window.sink
        for start, stop in self._pieces(0, len(tokens), self.context.n_batch):
            self._batch.fill_chain(tokens[start:stop], sink + start, self._all_ids, 0)
            self.context.decode(self._batch)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the whole target's states at a prompt's tokens."""
        if self._kept.chunks is not None:
            self._kept.chunks.learn_prompt(start, rows, count)

    def learn_round(self, outcome: RoundOutcome) -> None:
        """Learn the whole target's states at a round's tokens."""
        if self._kept.chunks is not None:
            self._kept.chunks.learn_round(outcome)

    def _cell(self, index: int) -> int:
        return self._kept.cells(index)

    def _index(self, cell: int) -> int:
        return self._kept.tokens(cell)
