"""A draft model as a source of rows, for chains (Leviathan et al. 2023) and trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.rows import Rows
from specrun.runtime.drafters.batching import ContextPart
from specrun.runtime.drafters.growing.nodes import GrowingNodes, depth_shape
from specrun.runtime.drafters.growing.source import Asked, NodeRows, Source
from specrun.runtime.laws.transform import Logits
from specrun.runtime.planning.theory import multiplications
from specrun.runtime.round.drafter import DraftRequest, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.eagle2 import DynamicShape
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT


class DraftModelSource(Source):
    """A draft model's tokens of one text, and the nodes of a growing tree below the last one.

    Sequence `main` of its own context holds exactly the tokens `cached`: committed ones, and those
    of a chain, which extends the text as plain decoding would. The nodes of other shapes lie below
    the text in sequences of their own (`GrowingNodes`): the context needs as many, and as many
    output rows, as `draft_size` returns, and one sequence more for rules that read rows of leaves.

    The draft model may have fewer tokens than the target: it is fed a stand-in for those it lacks,
    and its rows are cut to the tokens of both, so that the others have probability 0 in the draft,
    never in the target.
    """

    shared: ContextPart | None
    keeps_points = True

    def __init__(
        self, context: Context, shape: Topology | DynamicShape, *, target_vocab_size: int
    ) -> None:
        self.context = context
        self.n_params = context.model.n_params
        self.depth_params = multiplications(context.model)
        self._is_chain = isinstance(shape, Topology) and shape.n_leaves == 1
        self.keeps_rows = self._is_chain or context.options.n_sequences > draft_size(shape)[0]
        self.cached: list[int] = []
        # Set while the cache and `cached` change: an interrupt leaves it set, and `rewind` then
        # reads the memory itself.
        self._changing = False
        self.main = 0
        # Two, because repeated tokens of a batch are not written again.
        self.batch, self._single = Batch(context.n_batch, 1), Batch(1, 1)
        self._own_size = context.model.vocabulary.size
        self._shared_size = min(self._own_size, target_vocab_size)
        self._cuts_rows = self._shared_size < self._own_size
        eos = context.model.vocabulary.eos
        self._stand_in = eos if eos is not None else 0
        self.shared = context if isinstance(context, ContextPart) else None
        self._unread: list[int] = []
        # A sequence, and the call that evaluates a token in it; None before the first.
        self._step: tuple[int, Callable[[int, int], Logits] | None] = (-1, None)
        # Depths have a batch of their own: theirs is laid out alike, round by round.
        self._depth_batch = Batch(context.n_batch, 1)
        self.nodes = GrowingNodes(context.memory, context.options.n_sequences)

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
        """Return the result of `known` for each."""
        return tokens if max(tokens) < self._own_size else [*map(self.known, tokens)]

    def cut_row(self, logits: Logits) -> Logits:
        """Return a row cut to the tokens of both models, a view."""
        return logits[: self._shared_size] if self._cuts_rows else logits

    def first(self, rows: EvaluatedRows, count: int) -> list[Logits]:
        """Return the first `count` rows of an evaluation so, views."""
        if isinstance(rows, Rows) and not self._cuts_rows:
            return rows.first(count)
        return [self.cut_row(rows.logits(row)) for row in range(count)]

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after the cached ones; return the last one's logits, a view [shared]."""
        if len(tokens) == 1:
            return self.feed_one(tokens[0])
        n_batch = self.context.n_batch
        for begin in range(0, len(tokens), n_batch):
            piece = list(tokens[begin : begin + n_batch])
            start = self.cells(len(self.cached))
            known = [self.known(token) for token in piece]
            # Rows of earlier pieces are requested too: one row each is cheaper than a second kind
            # of batch.
            self.batch.fill_chain(known, start, (self.main,), 1)
            self._changing = True
            rows = self.context.decode(self.batch)
            self.cached.extend(piece)
            self._changing = False
        return self.cut_row(rows.logits(0))

    def feed_one(self, token: int) -> Logits:
        """Evaluate a token after the cached ones; return its logits, a view [shared vocab]."""
        known = token if token < self._own_size else self._stand_in
        cached, (sequence, step) = self.cached, self._step
        if step is None or sequence != self.main:
            step = self._new_step(known)
        self._changing = True
        row = step(known, self.cells(len(cached)))
        cached.append(token)
        self._changing = False
        return row[: self._shared_size] if self._cuts_rows else row

    def _new_step(self, token: int) -> Callable[[int, int], Logits]:
        """Return the call that evaluates a token at a position in the sequence `main`."""
        self._single.fill_one(token, self.cells(len(self.cached)), self.main)
        step = self.context.stepper(self._single) or self._decode_one
        self._step = self.main, step
        return step

    def _decode_one(self, token: int, position: int) -> Logits:
        """Evaluate a token in a batch of its own."""
        self._single.fill_one(token, position, self.main)
        return self.context.decode(self._single).logits(0)

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Cache a text up to `end`, if others share the context and would wait for all at once."""
        if self.shared is not None and len(self.cached) < end:
            self.feed(tokens[len(self.cached) : end])

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of a text's common part with the last one."""
        self._step = -1, None  # rows of another answer may be cut
        self.rewind(common_prefix(self.cached, tokens))

    def rewind(self, length: int) -> None:
        """Cut the cache to `length` tokens; drop all nodes, also of an interrupted round."""
        nodes, interrupted = self.nodes, self.nodes.grows
        if length >= len(self.cached) and not (self.shared or self._changing or interrupted):
            return
        if self.shared is not None:
            self.shared.withdraw()
        memory, end = self.context.memory, self.cells(min(length, len(self.cached)))
        left_over = self._changing and memory.last_position(self.main) >= end
        if interrupted or left_over or length < len(self.cached):
            self._changing = True
            # First: an interrupt in between must not leave tokens that are not cached.
            del self.cached[length:]
            nodes.cut(end)
        if interrupted:
            # Sequences taken by a round that never ended may or may not share the text already.
            for sequence, synced in enumerate(nodes.synced):
                if sequence != self.main:
                    memory.truncate(synced, sequence=sequence)
            nodes.forget()
        self._changing = False

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the accepted tokens' cache, whoever drafted them, and drop the rest."""
        start, tokens = outcome.start, outcome.tokens
        if self._is_chain:
            self.rewind(start + common_prefix(self.cached[start:], tokens[start:]))
        else:
            self.keep(tokens[start:])

    def row_after(self, tokens: Sequence[int]) -> Logits:
        """Return the model's own logits after all tokens of a text, a view [shared vocab]."""
        return self.feed(self._uncached(tokens))

    def _uncached(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens that are not cached; the last one's row is needed in any case."""
        self.rewind(len(tokens) - 1)
        return tokens[len(self.cached) :]

    # -- a draft -----------------------------------------------------------------------------------

    def root(self, request: DraftRequest, highest: int) -> NodeRows:
        """Evaluate the end of the text: after an accepted draft two tokens at once."""
        return NodeRows([self.row_after(request.tokens)])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        """Evaluate a depth in one batch."""
        if self._is_chain:  # a window moves before a draft, never within it
            return NodeRows((self.feed_one(tokens[0]),))  # kept, it would keep the memory open
        return NodeRows(self.first(self.evaluate(parents, tokens), len(tokens)))

    def evaluate(self, parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """Evaluate a depth in one batch: token i below node `parents[i]` (ROOT: the last token)."""
        self._fill_depth(parents, tokens)
        return self.context.decode(self._depth_batch)

    def _fill_depth(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        base = self.cells(len(self.cached))
        position = base + self.nodes.depth_of(parents[0])
        ids = self.nodes.add(parents, tokens, self.main, base)
        self._depth_batch.fill_shape(self.all_known(tokens), position, depth_shape(ids))

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep the nodes that spell the beginning of `tokens`, now committed; drop the others."""
        # No node was evaluated, so no sequence but main has to be cut.
        nodes = self.nodes
        if not len(nodes):
            return
        # Nodes are matched by token, not by number: another drafter may have drafted the path.
        path: list[int] = []
        for token in tokens:
            node = nodes.place_of(path[-1] if path else ROOT, token)
            if node is None:
                break
            path.append(node)
        base = self.cells(len(self.cached))
        self._drop_strays(path, base)
        if path:
            # The accepted path's own sequence becomes main: nothing is copied.
            self.main = nodes.ids[path[-1]]
            nodes.synced[self.main] = base + len(path)
        self.cached.extend(tokens[: len(path)])
        nodes.forget()

    def _drop_strays(self, path: Sequence[int], base: int) -> None:
        """Drop the cells of sequences beside a path; note how much of the text each holds then."""
        memory, nodes, length = self.context.memory, self.nodes, len(path)
        parents, depths = nodes.parents, nodes.depths
        if max(depths) > length:
            memory.truncate(base + length)  # one walk drops everything deeper, for all sequences
        for sequence, tip in dict(zip(nodes.ids, range(len(depths)), strict=True)).items():
            # Up to where the sequence agrees with the path its cells are the text's own, and may
            # stay: that is its deepest node on the path.
            node = tip
            while node != ROOT and node not in path:
                node = parents[node]
            shared = nodes.depth_of(node)
            if min(depths[tip], length) > shared:
                memory.truncate(base + shared, base + length, sequence)
            nodes.synced[sequence] = base + shared

    # -- with other conversations ------------------------------------------------------------------

    def submit(self, request: DraftRequest, asked: Asked) -> bool:
        """Submit an evaluation with those of other conversations."""
        assert isinstance(asked, tuple)
        assert self.shared is not None
        parents, tokens = asked
        if tokens and not self._is_chain:
            self._fill_depth(parents, tokens)
            self.shared.ask(self._depth_batch)
        else:
            self.ask(tokens or self._uncached(request.tokens))
        return True

    def result(self) -> NodeRows | None:
        """Return the rows of the requested evaluation; None before it was made."""
        assert self.shared is not None
        if not len(self.nodes):
            row = self._answer()
            return None if row is None else NodeRows([row])
        rows = self.shared.answered()
        return None if rows is None else NodeRows(self.first(rows, self._depth_batch.n_tokens))

    def ask(self, tokens: Sequence[int]) -> None:
        """As `feed`, evaluated with the requests of other conversations: `result` has the row."""
        self._unread = list(tokens)
        self._ask_piece()

    def _ask_piece(self) -> None:
        assert self.shared is not None
        piece = self._unread[: self.context.n_batch]
        start = self.cells(len(self.cached))
        self.batch.fill_chain([*map(self.known, piece)], start, (self.main,), 1)
        self._changing = True
        self.shared.ask(self.batch)

    def _answer(self) -> Logits | None:
        """Return the row after the requested tokens, a view [shared]; None while that waits."""
        assert self.shared is not None
        rows = self.shared.answered()
        if rows is None:
            return None
        n = self.batch.n_tokens
        self.cached.extend(self._unread[:n])
        self._changing = False
        del self._unread[:n]
        if self._unread:
            self._ask_piece()
            return None
        return self.cut_row(rows.logits(0))

    @property
    def native_seconds(self) -> float:
        """Time inside the draft model's evaluations."""
        return self.context.native_seconds

    def close(self) -> None:
        """Free the context; the model belongs to the weights. Calling it again does nothing."""
        self.context.close()


def draft_size(shape: Topology | DynamicShape) -> tuple[int, int]:
    """Return how many sequences and output rows a draft model needs for trees of this shape."""
    if isinstance(shape, DynamicShape):
        return shape.n_draft_sequences, shape.topk
    return shape.n_inner_leaves, max(shape.inner_widths, default=1)
