"""A bounded cache: sinks and a window of a text (StreamingLLM), and chunks of it (TriForce).

A draft model that was trained for shorter texts than the target drafts from such a window, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.draft_model.source import DraftModelSource
from specrun.runtime.laws.transform import Logits
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.eagle2 import DynamicShape
from specrun.runtime.trees.topology import Topology

# == Chunks of a long text, retrieved by the target's own states (TriForce, section 4) =============
#
# TriForce (Sun et al. 2024) keeps the chunks whose mean key the last query meets best. llama.cpp
# hands out neither queries nor keys, but the inputs of a layer at every token; their likeness
# stands in for that: a chunk's mean and the mean of the last tokens, less the mean of all, by the
# cosine. The states are kept in a random projection to a few numbers, which keeps angles (Johnson
# and Lindenstrauss 1984), so that a long text takes kilobytes a thousand tokens.


_WIDTH = 64  # numbers that are kept of a state


class ChunkMemory:
    """The states of one text, and which `count` of its chunks of `size` tokens are most alike.

    `layer` is the layer of the target whose inputs are read, [n_embd] each. Learning a position
    again replaces its facts.
    """

    def __init__(self, size: int, count: int, *, layer: int, n_embd: int, n_ctx: int) -> None:
        self._size, self._count, self.layer = size, count, layer
        generator = np.random.default_rng(0)  # all conversations alike, so that runs repeat
        self._projection = generator.standard_normal((n_embd, _WIDTH), np.float32)
        self._states = np.zeros((n_ctx, _WIDTH), np.float32)
        self._known = np.zeros(n_ctx, np.bool_)
        self._text: list[int] = []

    @property
    def most_kept(self) -> int:
        """The most tokens that are chosen."""
        return self._size * self._count

    def begin(self, tokens: Sequence[int]) -> None:
        """Turn to another text; the common part with the one before stays known."""
        shared = common_prefix(self._text, tokens)
        self._known[shared:] = False
        self._text = list(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the states of `count` tokens of a prompt, the first at position `start`."""
        for row in range(count):
            self._learn(start + row, rows, row)

    def learn_round(self, outcome: RoundOutcome) -> None:
        """Learn the states of a round's root and accepted nodes."""
        for place, row in enumerate(outcome.path_rows, outcome.start - 1):
            self._learn(place, outcome.rows, row)
        self._text += outcome.tokens[len(self._text) :]

    def _learn(self, position: int, rows: EvaluatedRows, row: int) -> None:
        if 0 <= position < len(self._known):
            self._states[position] = rows.layer_input(row, self.layer) @ self._projection
            self._known[position] = True

    def choose(self, start: int, end: int, now: int) -> Sequence[int]:
        """Return the positions of the chunks to keep of positions start <= p < end, ascending.

        They are compared with the last tokens before `now`; facts of later ones are not read, so
        that the same text has the same chunks, whatever came after it before.
        """
        n_chunks = (end - start) // self._size
        known = self._known[:now].nonzero()[0]
        if n_chunks < 1 or not len(known):
            return []
        states = self._states
        query = states[known[-self._size :]].mean(axis=0) - states[known].mean(axis=0)
        shape = (n_chunks, self._size)
        inside = self._known[start : start + n_chunks * self._size].reshape(shape)
        own = states[start : start + n_chunks * self._size].reshape(*shape, _WIDTH)
        counts = inside.sum(axis=1)
        means = (own * inside[:, :, None]).sum(axis=1) / np.maximum(counts, 1)[:, None]
        means -= states[known].mean(axis=0)
        lengths = np.linalg.norm(means, axis=1)
        scores = np.where(counts > 0, means @ query / np.maximum(lengths, 1e-12), -np.inf)
        best = np.argsort(-scores, kind="stable")[: self._count]
        starts = start + self._size * np.sort(best[counts[best] > 0])
        return (starts[:, None] + np.arange(self._size)).ravel().tolist()


# == Attention sinks and a window (StreamingLLM, Xiao et al. 2023) =================================
#
# The first tokens, on which models rest attention that goes nowhere else, and the last ones. The
# window moves in steps of its own size, so that it holds its size at least and twice that at most:
# where it begins follows from the length of the text alone, and the cost of moving (the kept tokens
# are evaluated anew) comes to one more token of a batch for every token of the text.


@dataclass(frozen=True, slots=True)
class Window:
    """Keeps the first `sink` tokens of a text, and of the others the last `size` at least."""

    sink: int
    size: int

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise OptionError(f"sink is {self.sink}: give 0 or more of a text's first tokens")
        if self.size < 1:
            raise OptionError(f"window is {self.size}: give at least 1 of a text's last tokens")

    def first_kept(self, length: int) -> int:
        """Return where the window begins in a text of so many tokens: earlier ones are dropped.

        The sink, as long as nothing is dropped.
        """
        return max(self.sink, (length // self.size - 1) * self.size)

    @property
    def most_cells(self) -> int:
        """The most tokens that are kept of a text, of any length."""
        return self.sink + 2 * self.size


class KeptTokens:
    """Which tokens of one growing text a cache holds: sink, chosen chunks, and a window.

    The cells are in the order of the text. The window stands where the last `move` put it: it
    begins at token `first`, and `between` are the tokens that are kept of those before it.
    """

    def __init__(self, window: Window, chunks: ChunkMemory | None = None) -> None:
        self.window, self.chunks = window, chunks
        self.first = window.sink
        self.between: Sequence[int] = ()

    @property
    def layer_inputs(self) -> tuple[int, ...]:
        """The layers of the target whose inputs decide which chunks are kept."""
        return () if self.chunks is None else (self.chunks.layer,)

    def begin(self, tokens: Sequence[int]) -> None:
        """Turn to another text."""
        if self.chunks is not None:
            self.chunks.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the target's states at a prompt's tokens, by which chunks are chosen."""
        if self.chunks is not None:
            self.chunks.learn_prompt(start, rows, count)

    def learn_round(self, outcome: RoundOutcome) -> None:
        """Learn the target's states at a round's tokens."""
        if self.chunks is not None:
            self.chunks.learn_round(outcome)

    def cells(self, length: int) -> int:
        """Return the number of cells for the kept ones of the first `length` tokens.

        Of a text that was cut to before the window the sink alone.
        """
        sink = self.window.sink
        if length <= sink or length < self.first:
            return min(length, sink)
        return sink + len(self.between) + length - self.first

    def tokens(self, cells: int) -> int:
        """Return how many tokens of the text are read if so many cells are filled."""
        beyond = cells - self.window.sink - len(self.between)
        return self.first + beyond if beyond >= 0 else min(cells, self.window.sink)

    def is_to_move(self, length: int, n_read: int) -> bool:
        """Whether the window has to move for a text of `length` tokens, of which so many are read.

        Of one that was cut to before the window nothing is left in it.
        """
        first = self.window.first_kept(length)
        return first != self.first or first > max(n_read, self.window.sink)

    def move(self, length: int) -> None:
        """Move the window to its place in a text of so many tokens; choose the tokens before."""
        window, chunks = self.window, self.chunks
        self.first = first = window.first_kept(length)
        # Of the shortest text that has the window there all but the last token was evaluated.
        now = first + window.size - 1
        self.between = () if chunks is None else chunks.choose(window.sink, first, now)


# == The bounded cache =============================================================================
#
# Positions are those within the cache (StreamingLLM, Xiao et al. 2023, section 3.2): the kept
# tokens stand side by side, so that no position exceeds the bound, however long the text is. Their
# keys and values are those of the kept tokens alone, evaluated again whenever the window moves:
# the cache holds the model's states of the shortened text (sliding window with
# re-computation, section 1), and where it has been before does not matter.


class PartialSource(DraftModelSource):
    """Evaluates texts of any length in a cache of a few cells: those of `kept`.

    `cached` are all tokens of the text that were read; `cells(n)` is the number of the first n in
    the cache. The window moves only where a round begins (`feed`, `ask`), never within a draft.
    """

    def __init__(
        self,
        context: Context,
        shape: Topology | DynamicShape,
        kept: KeptTokens,
        *,
        target_vocab_size: int,
    ) -> None:
        super().__init__(context, shape, target_vocab_size=target_vocab_size)
        self.kept, self.layer_inputs = kept, kept.layer_inputs
        self.n_text = 0  # the tokens of the text, those before the window included

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of a text's common part with the last one."""
        self.kept.begin(tokens)
        super().begin(tokens)
        self.n_text = len(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the target's states at a prompt's tokens."""
        self.kept.learn_prompt(start, rows, count)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn the target's states at the round's tokens; keep the accepted tokens' cache."""
        self.kept.learn_round(outcome)
        super().observe(outcome)

    def cells(self, length: int) -> int:
        """Return the number of cells for the kept ones of the first `length` cached tokens."""
        return self.kept.cells(length)

    def room(self, tokens: Sequence[int]) -> int:
        """Return the least number of cells that are left behind the kept part of a text."""
        n, window, chunks = len(tokens), self.kept.window, self.kept.chunks
        first = window.first_kept(n)
        most = 0 if chunks is None else min(chunks.most_kept, first - window.sink)
        return self.context.n_ctx - min(n, window.sink + most + max(0, n - first))

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after the cached ones; return the last one's logits, a view [shared]."""
        return super().feed(self._moved(tokens))

    def ask(self, tokens: Sequence[int]) -> None:
        """As `feed`, evaluated with the requests of other conversations."""
        super().ask(self._moved(tokens))

    def _moved(self, tokens: Sequence[int]) -> Sequence[int]:
        """Move the window if it has to; return the rest to evaluate.

        Then the kept part of the text before the window is evaluated anew.
        """
        n_cached, kept, sink = len(self.cached), self.kept, self.kept.window.sink
        self.n_text = n_cached + len(tokens)
        if not kept.is_to_move(self.n_text, n_cached):
            return tokens
        whole = [*self.cached, *tokens]
        n_cached = min(n_cached, sink)
        self.rewind(n_cached)
        kept.move(len(whole))
        end = min(kept.first, len(whole) - 1)  # the last token's row is needed in any case
        head = [*whole[n_cached : min(sink, end)], *(whole[place] for place in kept.between)]
        n_batch = self.context.n_batch
        self._changing = True
        for begin in range(0, len(head), n_batch):
            piece = self.all_known(head[begin : begin + n_batch])
            self.batch.fill_chain([*piece], n_cached + begin, (self.main,), 1)
            self.context.decode(self.batch)
        self.cached.extend(whole[n_cached:end])
        self._changing = False
        return whole[end:]
