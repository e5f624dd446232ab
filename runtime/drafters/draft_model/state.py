"""A draft model's cache in one conversation: committed tokens, and the nodes below them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from specrun.bindings.contexts.batch import Batch, BatchShape
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.batching import ContextPart
from specrun.runtime.laws.transform import Logits
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import ROOT


class DraftModelState:
    """A draft model's tokens of one text, and the nodes of a growing tree below the last one.

    Sequence `main` holds exactly the tokens `cached`: committed ones, and those of a chain. The
    draft model may have fewer tokens than the target: it is fed a stand-in for those it lacks, and
    its rows are cut to the tokens of both, so that the others have probability 0 in the draft,
    never in the target.

    A tree that still grows does not know its leaves, so llama.cpp's sequence ids are handed out
    on the way: the first child of a node goes on in its parent's sequence, each further one takes
    an unused sequence that first shares the parent's cells. Sharing (`seq_cp`) and dropping
    (`seq_rm`) walk all cells of the context; so a sequence catches up with the committed text only
    when it is taken, in the same walk. Between rounds sequence s holds exactly the first
    `_synced[s]` cells of the text. Nodes are numbered from 0 in the order of their evaluation.
    """

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
        # A sequence, and the call that evaluates a token in it; None before the first.
        self._step: tuple[int, Callable[[int, int], Logits] | None] = (-1, None)
        self._n_sequences = context.options.n_sequences
        # Depths have a batch of their own: theirs is laid out alike, round by round.
        self.depth_batch = Batch(context.n_batch, 1)
        self._synced = [0] * self._n_sequences
        self._forget_nodes()

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

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what a text shares with the last one."""
        self._step = -1, None  # rows of another answer may be cut
        self.rewind(common_prefix(self.cached, tokens))

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the target's states at a prompt's tokens, where the cache depends on them."""

    def learn_round(self, outcome: RoundOutcome) -> None:
        """Learn the target's states at a round's tokens, where the cache depends on them."""

    def rewind(self, length: int) -> None:
        """Cut the cache to `length` tokens; drop all nodes, and what an interrupt left."""
        interrupted = self._grows
        if length >= len(self.cached) and not (self._part or self._changing or interrupted):
            return
        if self._part is not None:
            self._part.withdraw()
        memory, end = self.context.memory, self.cells(min(length, len(self.cached)))
        left_over = self._changing and memory.last_position(self.main) >= end
        if interrupted or left_over or length < len(self.cached):
            self._changing = True
            # First: an interrupt in between must not leave tokens that are not cached.
            self._synced = [min(synced, end) for synced in self._synced]
            del self.cached[length:]
            memory.truncate(end)
        if interrupted:
            # Sequences taken by a round that never ended may or may not share the text already.
            for sequence in range(self._n_sequences):
                if sequence != self.main:
                    memory.truncate(self._synced[sequence], sequence=sequence)
            self._forget_nodes()
        self._changing = False

    def close(self) -> None:
        """Free the context; the model belongs to the weights. Calling it again does nothing."""
        self.context.close()

    # -- the tree below the text -------------------------------------------------------------------

    def _forget_nodes(self) -> None:
        # Of each node. The first child of a node goes on in its sequence.
        self._parents: list[int] = []
        self._tokens: list[int] = []
        self._ids: list[int] = []
        self._depths: list[int] = []
        self._free: list[int] = []  # sequences without nodes
        # Whether sequences may hold nodes: an interrupted round leaves it set. Last, because lists
        # without nodes say nothing of what is in the memory.
        self._grows = False

    @property
    def n_nodes(self) -> int:
        """How many nodes were evaluated since the last ones were kept or dropped."""
        return len(self._parents)

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the evaluated node of a token below another; None if there is none.

        Of equal children it is the first.
        """
        if token in self._tokens:
            for node, drafted in enumerate(self._tokens):
                if drafted == token and self._parents[node] == parent:
                    return node
        return None

    def depth_of(self, node: int) -> int:
        """Return how many nodes lead to an evaluated one, itself included; 0 for ROOT."""
        return 0 if node == ROOT else self._depths[node]

    def evaluate(self, parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """Evaluate a depth in one batch: token i below node `parents[i]` (ROOT: the last token)."""
        self._fill_depth(parents, tokens)
        return self.context.decode(self.depth_batch)

    def ask_depth(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """As `evaluate`, with what other conversations ask for: `answer_depth` has the rows."""
        assert self._part is not None
        self._fill_depth(parents, tokens)
        self._part.ask(self.depth_batch)

    def answer_depth(self) -> Rows | None:
        """Return the rows of what was asked for; None while that waits."""
        assert self._part is not None
        return self._part.answered()

    def _fill_depth(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        above, own, main, first = self._parents, self._ids, self.main, self.n_nodes
        depth = self.depth_of(parents[0])
        position = self.cells(len(self.cached)) + depth
        if not self._grows:
            self._free = [each for each in range(self._n_sequences) if each != main]
        self._grows = True
        for parent in parents:
            sequence = main if parent == ROOT else own[parent]
            # The first child goes on in its parent's sequence, which costs no walk over the cells.
            if parent in above:
                sequence = self._branched(sequence, position)
            above.append(parent)
            own.append(sequence)
        self._tokens += tokens
        self._depths += [depth + 1] * len(parents)
        known, ids = self.all_known(tokens), (*own[first:],)
        self.depth_batch.fill_shape(known, position, _depth_shape(ids))

    def _branched(self, source: int, end: int) -> int:
        """Return a sequence without nodes, which now shares all before `end` with another."""
        if not self._free:
            limit = f"the draft context's {self._n_sequences} sequences"
            raise OptionError(f"a draft tree with more paths than {limit}")
        sequence = self._free.pop(0)
        # It holds the text up to `_synced`, and shares the rest at once.
        self.context.memory.branch(source, sequence, self._synced[sequence], end)
        return sequence

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep the nodes that spell the beginning of `tokens`, now committed; drop the others."""
        # No node was evaluated, so no sequence but main has to be cut.
        if not self._parents:
            return
        # Nodes are matched by token, not by number: another drafter may have drafted the path.
        path: list[int] = []
        for token in tokens:
            node = self.place_of(path[-1] if path else ROOT, token)
            if node is None:
                break
            path.append(node)
        base = self.cells(len(self.cached))
        self._drop_strays(path, base)
        if path:
            # The accepted path's own sequence becomes main: nothing is copied.
            self.main = self._ids[path[-1]]
            self._synced[self.main] = base + len(path)
        self.cached.extend(tokens[: len(path)])
        self._forget_nodes()

    def _drop_strays(self, path: Sequence[int], base: int) -> None:
        """Drop what sequences hold beside a path; note how much of the text each holds then."""
        parents, depths, length = self._parents, self._depths, len(path)
        truncate, synced = self.context.memory.truncate, self._synced
        if max(depths) > length:
            truncate(base + length)  # one walk drops everything deeper, for all sequences
        for sequence, tip in dict(zip(self._ids, range(len(depths)), strict=True)).items():
            # Up to where the sequence agrees with the path its cells are the text's own, and may
            # stay: that is its deepest node on the path.
            node = tip
            while node != ROOT and node not in path:
                node = parents[node]
            shared = 0 if node == ROOT else depths[node]
            if length > shared < depths[tip]:
                truncate(base + shared, base + length, sequence)
            synced[sequence] = base + shared


@functools.lru_cache(maxsize=256)
def _depth_shape(ids: tuple[int, ...]) -> BatchShape:
    """Return the shape of a depth: one position, siblings side by side in different sequences."""
    return BatchShape.of([0] * len(ids), [(sequence,) for sequence in ids], [1] * len(ids))
