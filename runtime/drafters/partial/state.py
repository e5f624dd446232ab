"""A bounded cache of the target's own weights: the first tokens of a text and the last ones.

Positions are those within the cache (StreamingLLM, Xiao et al. 2023, section 3.2): the kept tokens
stand side by side, so that no position exceeds the bound, however long the text is. Their keys and
values are those of the kept tokens alone, evaluated again whenever the window moves: what the cache
says is what the model says of the shortened text (sliding window with re-computation, section 1),
and where it has been before does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.contexts.context import Context
from specrun.runtime.drafter import RoundOutcome
from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.drafters.draft_model.tree_state import DraftTreeState
from specrun.runtime.drafters.partial.window import KeptTokens
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.transform import Logits


class PartialState(DraftModelState):
    """Evaluates texts of any length in a cache of a few cells: what `kept` says.

    `cached` are all tokens of the text that were read; `cells(n)` says how many of the first n the
    cache holds. The window moves only where a round begins (`feed`), never within a draft.
    """

    feeds_plainly = False

    def __init__(self, context: Context, kept: KeptTokens) -> None:
        super().__init__(context, target_vocab_size=context.model.vocabulary.size)
        self.kept = kept
        self.n_text = 0  # the tokens of the text, those before the window included

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what a text shares with the last one."""
        if self.kept.chunks is not None:
            self.kept.chunks.begin(tokens)
        super().begin(tokens)
        self.n_text = len(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the target's states at a prompt's tokens, by which chunks are chosen."""
        if self.kept.chunks is not None:
            self.kept.chunks.learn_prompt(start, rows, count)

    def learn_round(self, outcome: RoundOutcome) -> None:
        """Learn the target's states at a round's tokens."""
        if self.kept.chunks is not None:
            self.kept.chunks.learn_round(outcome)

    def cells(self, length: int) -> int:
        """Return how many cells hold what is kept of the first `length` cached tokens."""
        return self.kept.cells(length)

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind what is kept of a text, at the least."""
        n, window, chunks = len(tokens), self.kept.window, self.kept.chunks
        first = window.first_kept(n)
        most = 0 if chunks is None else min(chunks.most_kept, first - window.sink)
        return self.context.n_ctx - min(n, window.sink + most + max(0, n - first))

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after the cached ones; return the last one's logits, a view [vocab].

        Where the window moves, what is kept then is evaluated anew.
        """
        n_cached, kept, sink = len(self.cached), self.kept, self.kept.window.sink
        new = read = tokens
        if kept.is_to_move(n_cached + len(tokens), n_cached):
            whole = [*self.cached, *tokens]
            n_cached = min(n_cached, sink)
            self.rewind(n_cached)
            kept.move(len(whole))
            between = [whole[place] for place in kept.between]
            read, new = whole[n_cached:], [*whole[n_cached:sink], *between, *whole[kept.first :]]
        start, n_batch = self.cells(n_cached), self.context.n_batch
        self._changing = True
        for begin in range(0, len(new), n_batch):
            piece = [self.known(token) for token in new[begin : begin + n_batch]]
            self.batch.fill_chain(piece, start + begin, (self.main,), 1)
            rows = self.context.decode(self.batch)
        self.cached.extend(read)
        self.n_text = len(self.cached)
        self._changing = False
        return self.shared(rows.logits(0))


class PartialTreeState(PartialState, DraftTreeState):
    """The same, and below the last committed token the nodes of a growing tree."""
