"""A draft model's cache in one conversation: which committed tokens it holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.rows import Rows
from specrun.runtime.compiled import LOOPS, Draws, UnmadeLaw
from specrun.runtime.drafter import RoundOutcome
from specrun.runtime.drafters.meeting import ContextPart
from specrun.runtime.law import SHORT, FloatArray
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.text import common_prefix
from specrun.runtime.transform import Logits, greedy_token, transformed_law
from specrun.runtime.tree import ChainDraws, DraftTree

_LIKELIEST = SamplingParams(temperature=0.0)


class DraftModelState:
    """Evaluates committed tokens for sequence `main` and knows which of them are cached.

    `cached` are exactly the tokens that `main` holds. The draft model may know fewer tokens than
    the target: it is fed a stand-in for those it lacks, and its rows are cut to the tokens that
    both know, so that the others have probability 0 in the draft, never in the target.
    """

    feeds_plainly = True
    """Whether to feed tokens is to evaluate them, and nothing else happens before."""

    def __init__(self, context: Context, *, target_vocab_size: int) -> None:
        self.context = context
        self.cached: list[int] = []
        # Set while the cache and `cached` change: an interrupt leaves it set, and `rewind` then
        # asks the memory itself.
        self._changing = False
        self.main = 0
        # Two, because what a batch repeats is not written again.
        self.batch, self._single = Batch(context.n_batch, 1), Batch(1, 1)
        self._own_size = context.model.vocabulary.size
        self._shared_size = min(self._own_size, target_vocab_size)
        self._cuts_rows = self._shared_size < self._own_size
        eos = context.model.vocabulary.eos
        self._stand_in = eos if eos is not None else 0
        self._part = context if isinstance(context, ContextPart) else None
        self.shares_context = self._part is not None  # with other conversations
        self._unread: list[int] = []
        self._scratch = np.empty(0)  # where compiled code makes a law

    def cells(self, length: int) -> int:
        """Return how many cells hold the first `length` cached tokens."""
        return length

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind a text."""
        return self.context.n_ctx - len(tokens)

    def known(self, token: int) -> int:
        """Return the token, or a token that stands in for one that the draft model lacks."""
        return token if token < self._own_size else self._stand_in

    def all_known(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return what `known` makes of each."""
        return tokens if max(tokens) < self._own_size else [*map(self.known, tokens)]

    def shared(self, logits: Logits) -> Logits:
        """Return a row cut to the tokens of both models, a view."""
        return logits[: self._shared_size] if self._cuts_rows else logits

    def first(self, rows: EvaluatedRows, count: int) -> list[Logits]:
        """Return the first `count` rows of an evaluation so, views."""
        if isinstance(rows, Rows) and not self._cuts_rows:
            return rows.first(count)
        return [self.shared(rows.logits(row)) for row in range(count)]

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after the cached ones; return the last one's logits, a view [shared]."""
        if len(tokens) == 1:
            return self.feed_one(tokens[0])
        n_batch = self.context.n_batch
        for begin in range(0, len(tokens), n_batch):
            piece = list(tokens[begin : begin + n_batch])
            start = self.cells(len(self.cached))
            known = [self.known(token) for token in piece]
            # Rows of earlier pieces are asked for too: one row each is cheaper than a second kind
            # of batch.
            self.batch.fill_chain(known, start, (self.main,), 1)
            self._changing = True
            rows = self.context.decode(self.batch)
            self.cached.extend(piece)
            self._changing = False
        return self.shared(rows.logits(0))

    def feed_one(self, token: int) -> Logits:
        """Evaluate a token after the cached ones; return its logits, a view [shared vocab]."""
        known = token if token < self._own_size else self._stand_in
        self._single.fill_one(known, self.cells(len(self.cached)), self.main)
        self._changing = True
        rows = self.context.decode(self._single)
        self.cached.append(token)
        self._changing = False
        return self.shared(rows.logits(0))

    @property
    def waits(self) -> bool:
        """Whether tokens are best evaluated with those of other conversations: `ask`."""
        return self._part is not None and self._part.waits

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Cache a text up to `end`, if others share the context and would wait for all at once."""
        if self._part is not None and len(self.cached) < end:
            self.feed(tokens[len(self.cached) : end])

    def ask(self, tokens: Sequence[int]) -> None:
        """As `feed`, evaluated with what other conversations ask for: `answer` has the row."""
        self._unread = list(tokens)
        self._ask_piece()

    def _ask_piece(self) -> None:
        assert self._part is not None
        piece = self._unread[: self.context.n_batch]
        start = self.cells(len(self.cached))
        self.batch.fill_chain([*map(self.known, piece)], start, (self.main,), 1)
        self._changing = True
        self._part.ask(self.batch)

    def answer(self) -> Logits | None:
        """Return the row after what was asked for, a view [shared]; None while that waits."""
        assert self._part is not None
        rows = self._part.answered()
        if rows is None:
            return None
        n = self.batch.n_tokens
        self.cached.extend(self._unread[:n])
        self._changing = False
        del self._unread[:n]
        if self._unread:
            self._ask_piece()
            return None
        return self.shared(rows.logits(0))

    def feed_likeliest(self, token: int, most: int, ends: frozenset[int]) -> list[int] | None:
        """Evaluate a token after the cached ones, then the most likely one after it, and so on.

        Returns the most likely token after each of up to `most` that were evaluated, fewer where
        one is among `ends`: the tokens that `feed_one` and `greedy_token` give in turn. None where
        compiled code cannot. Raises `DecodeFailedError` for a broken row.
        """
        loops, cached, batch, known = LOOPS, self.cached, self._single, self._shared_size
        if loops is None or batch.n_bytes != loops.BATCH_BYTES or token >= self._own_size:
            return None
        start = self.cells(len(cached))
        batch.fill_one(token, start, self.main)
        self._changing = True
        tokens = self.context.repeat(
            batch, lambda addresses: loops.greedy_chain(addresses, token, start, most, known, ends)
        )
        if tokens is None:
            self._changing = False
            return None
        cached += [token, *tokens[:-1]]
        self._changing = False
        if tokens[-1] < 0:
            row = self.context.rows_of(batch).logits(0)
            greedy_token(self.shared(row), _LIKELIEST)  # says what is wrong
        return tokens

    def can_draw_on(self, params: SamplingParams) -> bool:
        """Whether compiled code draws from laws of these settings: `feed_drawn`."""
        loops, part = LOOPS, self._part
        if loops is None or part is not None or self.batch.n_bytes != loops.BATCH_BYTES:
            return False
        few = params.is_cut and params.top_k <= SHORT and params.top_k < self._shared_size
        return few and self.context.can_repeat

    def feed_drawn(
        self,
        token: int | None,
        draws: Draws,
        params: SamplingParams,
        ends: frozenset[int],
    ) -> DraftTree:
        """Evaluate a token after the cached ones, draw the next one from its law, and so on.

        Without a token the first draw is from the row of what was fed last. Returns the chain of
        the tokens drawn, as many as there are `draws` or fewer where one is among `ends`, with the
        laws they were drawn from: those that `feed_one`, `transformed_law` and the
        noise's `choose` give in turn. Only where it `can_draw_on` the settings. Raises
        `DecodeFailedError` for a broken row.
        """
        loops, cached, batch, known = LOOPS, self.cached, self._single, self._shared_size
        assert loops is not None
        start, scratch = self.cells(len(cached)), self._room_for(params)
        laws: list[UnmadeLaw] = []  # not list[...](), which makes the type anew each time
        first, cuts = -1 if token is None else token, (np.exp, *params.cuts[1:])

        def draw(addresses: tuple[int, ...]) -> tuple[int, float, list[int]]:
            place = addresses, first, (start, known), ends
            return loops.drawn_chain(*place, draws, laws, scratch, cuts)

        batch.fill_one(max(first, 0), start, self.main)
        self._changing = True
        tokens = self.context.repeat(batch, draw)
        assert tokens is not None
        cached += tokens[:-1] if token is None else [token, *tokens[:-1]]
        self._changing = False
        if tokens[-1] < 0:
            row = self.context.rows_of(batch).logits(0)
            transformed_law(self.shared(row), params)  # says what is wrong
        return DraftTree.drawn_chain(tokens, ChainDraws(laws))

    def _room_for(self, params: SamplingParams) -> FloatArray:
        """Return where compiled code makes the probabilities of a law."""
        k = params.cuts[0]
        if len(self._scratch) != k:
            self._scratch = np.empty(k)
        return self._scratch

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what a text shares with the last one."""
        self.rewind(common_prefix(self.cached, tokens))

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the target's states at a prompt's tokens, where the cache depends on them."""

    def learn_round(self, outcome: RoundOutcome) -> None:
        """Learn the target's states at a round's tokens, where the cache depends on them."""

    def rewind(self, length: int) -> None:
        """Cut the cache to `length` tokens; drop what an interrupted evaluation may have left."""
        if length >= len(self.cached) and self._part is None and not self._changing:
            return
        if self._part is not None:
            self._part.withdraw()
        memory, end = self.context.memory, self.cells(min(length, len(self.cached)))
        left_over = self._changing and memory.last_position(self.main) >= end
        if length < len(self.cached) or left_over:
            self._changing = True
            # First: an interrupt in between must not leave tokens that are not cached.
            del self.cached[length:]
            memory.truncate(end)
        self._changing = False

    def close(self) -> None:
        """Free the context; the model belongs to the weights. Calling it again does nothing."""
        self.context.close()
