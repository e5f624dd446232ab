"""The target model: tree attention in one batch, and the KV cache of the accepted path.

A draft tree becomes sequences (`layout`), one for each root-to-leaf path; after acceptance all
of them are brought onto the accepted path again.

The cells of a text lie in the order of its positions, as plain decoding leaves them: attention sums
over cells in the order in which they lie, half-precision sums depend on that order, and activations
that are quantized again make tenths of a nat of the difference. So a tree's likeliest path is
evaluated first. Accepted nodes that lie in place are kept; the others are dropped and evaluated
again with the next round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.memory import ALL_SEQUENCES
from specrun.bindings.contexts.rows import Candidates, Rows
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.layout import (
    FILLER,
    Arrangement,
    TreeLayout,
    arrange_tree,
    layout_tree,
    moves_onto,
    require_path,
)
from specrun.runtime.trees.tree import DraftTree

if TYPE_CHECKING:
    from specrun.bindings.contexts.embedding_inputs import EmbeddingBatch, EmbeddingInputs

# Prompts are evaluated in pieces, because Ctrl-C is only seen between evaluations.
_PREFILL_CHUNK = 256
# With hidden states every token of a prompt needs an output row: the least that pieces hold.
_HIDDEN_STATE_ROWS = 64
# Output rows for accepted tokens that are evaluated again: more of them have a batch of their own.
_PENDING_ROWS = 8

# Checkpoints of a recurrent state lie no nearer than this, and in long texts no further apart.
_NEAREST_CHECKPOINTS, _FURTHEST_CHECKPOINTS = 16, 2048

# -- texts and their targets -----------------------------------------------------------------------


class EvaluatedRows(Protocol):
    """The rows of one evaluation, valid until the next: 0 for the root, i + 1 for node i."""

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of one row, [n_vocab]."""

    def hidden_states(self, wanted: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return a copy of the final hidden states of these rows, [n, n_embd]."""

    def layer_input(self, row: int, layer: int) -> npt.NDArray[np.float32]:
        """Return the input of one of the target's layers at one row, [n_embd]."""

    def nextn_state(self, row: int) -> npt.NDArray[np.float32]:
        """Return the state that NextN blocks read of one row, [n_embd_out]."""


class PlacedRows:
    """The rows of a round in a wider evaluation: 0 for the root, i + 1 for node i."""

    __slots__ = ("_places", "_rows")

    def __init__(self, rows: EvaluatedRows, places: Sequence[int]) -> None:
        self._rows, self._places = rows, places

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of one row, [n_vocab]."""
        return self._rows.logits(self._places[row])

    def candidates(self, row: int) -> Candidates | None:
        """Return the best logits of one row if only those reached the host."""
        return cast("Rows", self._rows).candidates(self._places[row])

    def hidden_states(self, wanted: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return a copy of the final hidden states of these rows, [n, n_embd]."""
        return self._rows.hidden_states([self._places[row] for row in wanted])

    def layer_input(self, row: int, layer: int) -> npt.NDArray[np.float32]:
        """Return the input of one of the target's layers at one row, [n_embd]."""
        return self._rows.layer_input(self._places[row], layer)

    def nextn_state(self, row: int) -> npt.NDArray[np.float32]:
        """Return the state that NextN blocks read of one row, [n_embd_out]."""
        return self._rows.nextn_state(self._places[row])


PromptLearner = Callable[[int, EvaluatedRows, int], None]


class CachedText:
    """The committed tokens of one text, and how many of them a target has cached.

    A target holds the keys and values of `tokens[:n_cached]` and of nothing else that counts. The
    first `n_prompt` were read as a prompt, those after them generated. `n_cached` shrinks before
    the cache does and grows after it, so an interrupt at any line leaves a number that is true.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.n_cached = self.n_prompt = 0

    def commit(self, tokens: Iterable[int]) -> None:
        """Append accepted tokens, which the target has cached like all that were there before."""
        self.tokens.extend(tokens)
        self.n_cached = len(self.tokens)

    def cut(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        # The number before the tokens: an interrupt between them must not leave it too high.
        self.n_cached = min(self.n_cached, length)
        self.n_prompt = min(self.n_prompt, length)
        del self.tokens[length:]


class Target(Protocol):
    """The target, as the decoding loop needs it; the text holds the cached part."""

    def evaluate(self, text: CachedText, tree: DraftTree) -> EvaluatedRows | None:
        """Evaluate the last committed token, which is not cached yet, and the tree below it.

        None: the evaluation waits for other texts' trees; call again when it was made.
        """

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        """Keep the root and these nodes, a path from the root down; append their tokens."""


class DraftSize(Protocol):
    """The target's needs for a drafter's trees."""

    max_leaves: int
    max_nodes: int
    needs_hidden_states: bool
    layer_inputs: tuple[int, ...]
    needs_nextn_states: bool
    embedding_inputs: EmbeddingInputs | None


class TargetModel:
    """A llama.cpp context as the target of one text at a time.

    It keeps nothing of a text beside the context's cache. Every token is cached for all
    of the text's sequence ids, because a tree's paths, one id each, all start from the same prefix.
    Those are all ids of the context, or `sequences`, if the others are for other texts. `inputs`
    are the drafter's, whose trees have nodes that are no tokens (look-ahead positions): their
    neighbours are then given to the model as embeddings, too.
    """

    width: int | None = None
    """How many tokens each evaluation of a round has; None: as many as it needs."""

    def __init__(
        self,
        context: Context,
        inputs: EmbeddingInputs | None = None,
        sequences: range | None = None,
    ) -> None:
        self.context = context
        of_context = range(context.options.n_sequences)
        own = of_context if sequences is None else sequences
        self._n_sequences, self._first_id = len(own), own.start
        self._all_ids = tuple(own)
        # One walk over the cells drops positions of all ids of the context.
        self._dropped = (ALL_SEQUENCES,) if own == of_context else self._all_ids
        self._can_branch = context.model.can_branch
        self._lends = False
        # The layout of the last requested shape: rounds repeat one, mostly.
        self._known: tuple[tuple[int, ...], TreeLayout] | None = None
        self._arrangement: Arrangement | None = None  # of the round under way
        self._batch = Batch(context.n_batch, self._n_sequences)
        self._inputs, self._embedded = inputs, None if inputs is None else self._embedding_batch()

    def lend(self) -> tuple[Context, int]:
        """Return the context and a sequence of the text, for a drafter that reads its cells.

        Accepted nodes that lie out of place then stay until the next evaluation.
        """
        self._lends = True
        return self.context, self._first_id

    @property
    def is_alone(self) -> bool:
        """Whether the context holds no other text."""
        return self._n_sequences == self.context.options.n_sequences

    @property
    def native_seconds(self) -> float:
        """Seconds of native evaluation so far, for the text."""
        return self.context.native_seconds

    @property
    def graphs_reused(self) -> int | None:
        """How many evaluations so far had the shape of the one before; None: not the text's own."""
        return self.context.graphs_reused

    @property
    def n_positions(self) -> int:
        """The most tokens that a text may have."""
        return self.context.n_ctx

    @property
    def max_nodes(self) -> int:
        """The most tree nodes one evaluation can take beside the root."""
        memory, most = self.context.memory, self._most_tokens - 1
        if self._can_branch or memory.spare is not None:
            return most
        return min(most, memory.n_rollback)

    @property
    def _most_tokens(self) -> int:
        """The most tokens that one evaluation of a round takes."""
        return self.width or min(self.context.n_batch, self.context.n_outputs)

    @property
    def longest_piece(self) -> int:
        """The most tokens of a prompt that are evaluated at once."""
        most = min(_PREFILL_CHUNK, self.context.n_batch)
        if not self.context.options.hidden_states:
            return most
        # llama.cpp then makes an output row for every token of a batch. Pieces of other lengths
        # than multiples of 64 would end with fewer rows than the kernels of prompts take.
        rows = self.context.n_outputs
        return min(most, rows if rows < _HIDDEN_STATE_ROWS else rows - rows % _HIDDEN_STATE_ROWS)

    def reusable(self, text: CachedText, prompt: Sequence[int], *, states: bool) -> int:
        """Return how many tokens of a prompt are to be taken as they are cached.

        `states`: the drafter needs the state before the first new token, with that token.
        """
        shared = min(common_prefix(text.tokens, prompt), len(prompt) - 1)
        end = min(shared, len(text.tokens) - 1)
        if text.n_prompt <= text.n_cached < end:
            # Pending tokens get the bits of a round, and not those of a longer prompt.
            self.rewind(text, len(text.tokens))
            self._catch_up(text, end)
        shared = min(shared, text.n_cached)
        # A recurrent state that ends here goes on from the states that the drafter has seen.
        goes_on = not self._can_branch and shared == text.n_cached
        return max(0, shared - 1) if states and not goes_on else shared

    def rewind(self, text: CachedText, length: int) -> None:
        """Drop everything of the text after its first `length` tokens.

        Also drops the rest of an interrupted round from the cache. A memory that cannot drop a part
        returns to an earlier state (`Memory.return_to`), and `text.n_cached` is less than `length`.
        """
        memory, was_cached = self.context.memory, text.n_cached
        # A failed evaluation clears a memory that cannot drop a part: its state is the truth.
        last = memory.last_position(self._first_id)
        text.n_cached = min(was_cached, self._index(last + 1))
        text.cut(length)
        if self._can_branch:
            # Even if nothing was cut: an interrupted round's nodes lie behind the cached tokens.
            self._drop(self._cell(text.n_cached))
        elif text.n_cached <= last:
            kept, text.n_cached = text.n_cached, 0
            text.n_cached = memory.return_to(kept, self._first_id)

    def returns_to(self, text: CachedText, length: int) -> int:
        """Return how many tokens of a text would stay cached if it was cut at `length`."""
        length = min(length, text.n_cached)
        if self._can_branch:
            return length
        return min(length, self.context.memory.returns_to(length, self._first_id))

    def _drop(self, start: int) -> None:
        """Drop all positions from `start` on, for every sequence of the text."""
        for sequence in self._dropped:
            self.context.memory.truncate(start, -1, sequence)

    def prefill(self, text: CachedText, end: int, learn: PromptLearner | None = None) -> None:
        """Evaluate the text's tokens up to `end`, piece by piece: see `prefill_pieces`."""
        for _ in self.prefill_pieces(text, end, learn):
            pass

    def prefill_pieces(
        self, text: CachedText, end: int, learn: PromptLearner | None = None
    ) -> Iterator[None]:
        """Evaluate the text's tokens up to `end`: with rows only if there are hidden states.

        Yields after each piece. With states of any kind `learn` receives each: the position of its
        first token, its rows, how many.
        """
        options = self.context.options
        hidden_states = options.hidden_states
        has_states = hidden_states or options.nextn_states or bool(options.layer_inputs)
        text.n_prompt = end
        borders = self._borders(text, end)
        parts = pairwise(sorted({text.n_cached, *borders, end}))
        spans = (span for part in parts for span in self._pieces(*part, self.longest_piece))
        for start, stop in spans:
            piece = self._fed(text.tokens[start:stop])
            n_rows, cell = len(piece) if hidden_states else 0, self._cell(start)
            self._batch.fill_chain(piece, cell, self._all_ids, n_rows)
            rows = self.context.decode(self._batch)
            if has_states and learn is not None:
                learn(start, rows, len(piece))
            # After that, so that an interrupt anywhere above leaves a number that is true.
            text.n_cached = start + len(piece)
            if text.n_cached in borders:
                self.context.memory.note_checkpoint(self._first_id)
            yield

    def _borders(self, text: CachedText, end: int) -> frozenset[int]:
        """Return the lengths of a prompt after which its state is kept, if it keeps checkpoints."""
        if self.context.memory.checkpoints is None:
            return frozenset()
        is_control = self.context.model.vocabulary.is_control
        controls = [i for i in range(text.n_cached, end) if is_control(text.tokens[i])]
        return checkpoint_places(controls, text.n_cached, end)

    def evaluate(self, text: CachedText, tree: DraftTree) -> EvaluatedRows:
        """Evaluate the tokens that are not cached, and `tree` below the last of them, at once.

        That is the last token alone, unless accepted ones before it lay out of place.
        """
        if self._lends and self.context.memory.last_position(self._first_id) >= text.n_cached:
            self._drop(self._cell(text.n_cached))
        tokens, parents, places = self._in_order(text, tree)
        if tree.tokens and self.context.memory.spare is not None:
            self.context.memory.hold()
        rows = self._evaluate_at(text.n_cached, tokens, parents)
        return rows if places is None else PlacedRows(rows, places)

    def _in_order(
        self, text: CachedText, tree: DraftTree
    ) -> tuple[list[int], tuple[int, ...], tuple[int, ...] | None]:
        """Return a round's tokens in the order of evaluation, and the parents of all but the first.

        And where the root and the tree's nodes are among them; None: at the front.
        """
        tokens = text.tokens
        if text.n_cached != len(tokens) - 1:
            self._check_pending(text, tree)
        arranged = self._arrangement = self._arranged(text, tree)
        if arranged is None:
            return [tokens[-1], *tree.tokens], tree.parents, None
        in_order = [*tokens[text.n_cached :], *map(tree.tokens.__getitem__, arranged.order)]
        if self.width is not None:
            in_order += [FILLER] * (self.width - len(in_order))
        return in_order, arranged.parents, arranged.places

    def _check_pending(self, text: CachedText, tree: DraftTree) -> None:
        """Evaluate tokens that are not cached if there is no room for them beside the tree."""
        last = len(text.tokens) - 1
        if not text.n_prompt <= text.n_cached <= last:
            cached = f"of {len(text.tokens)} tokens {text.n_cached} are cached"
            problem = f"{cached}: a tree grows from a token that is not, behind the prompt"
            raise OptionError(problem)
        if last - text.n_cached + 1 + len(tree.tokens) > self._most_tokens:
            self._catch_up(text, last)

    def catch_up(self, text: CachedText) -> EvaluatedRows:
        """Evaluate all tokens that are not cached, in one batch; row 0 is the last one's.

        They are then cached, the last one too. Long prompts are evaluated in pieces before.
        """
        end = len(text.tokens)
        start = max(text.n_cached, end - min(_PREFILL_CHUNK, self.context.n_batch))
        self.prefill(text, start)
        self._batch.fill_chain(self._fed(text.tokens[start:]), self._cell(start), self._all_ids, 1)
        rows = self.context.decode(self._batch)
        text.n_cached = end
        return rows

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        """Keep root and `path`, for every sequence: the nodes in place now, others next round.

        A state that cannot drop a part of a chain returns to that before the round, and everything
        that is kept comes next round.
        """
        memory = self.context.memory
        if memory.spare is not None and len(path) < len(tree.tokens):
            memory.return_to_held()
            text.tokens.extend(map(tree.tokens.__getitem__, path))
            return
        arranged = self._arrangement
        if arranged is None or not (path or arranged.places[0] or self.width):
            self._commit_in_place(text, tree, path)
            return
        kept = arranged.places[0]
        if path:
            require_path(path, tree.parents)
            kept += arranged.n_in_place(path)
        nodes: Sequence[int] = range(kept)
        if self._lends:
            nodes = [*range(arranged.places[0]), *(arranged.places[node + 1] - 1 for node in path)]
        self._keep_at(text.n_cached, arranged.parents, nodes)
        n_cached = text.n_cached + 1 + kept
        text.tokens.extend(map(tree.tokens.__getitem__, path))
        # Last, so that an interrupt anywhere above leaves a number that is true.
        text.n_cached = n_cached

    def _commit_in_place(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        """Keep root and `path` of a tree whose nodes may stay where they lie."""
        if path:
            self._keep_at(text.n_cached, tree.parents, path)
            text.commit(map(tree.tokens.__getitem__, path))
            return
        if tree.parents:
            self._drop(text.n_cached + 1)
        text.n_cached = len(text.tokens)

    def _arranged(self, text: CachedText, tree: DraftTree) -> Arrangement | None:
        """Return the order of a round's tokens; None for a chain behind a text that is cached."""
        n_pending, depths, width = len(text.tokens) - 1 - text.n_cached, tree.depths, self.width
        if not n_pending and width is None and (not depths or depths[-1] == len(depths)):
            return None
        return arrange_tree(tree.parents, tree.is_candidate, n_pending, width or 0)

    def _catch_up(self, text: CachedText, end: int) -> None:
        """Evaluate pending tokens, up to `end`, in batches of their own."""
        while text.n_cached < end:
            tokens = text.tokens[text.n_cached : min(end, text.n_cached + self._most_tokens)]
            arranged = arrange_tree((), (), len(tokens) - 1, self.width or 0)
            filling = [FILLER] * (1 + len(arranged.parents) - len(tokens))
            self._evaluate_at(text.n_cached, tokens + filling, arranged.parents)
            self._keep_at(text.n_cached, arranged.parents, range(len(tokens) - 1))
            text.n_cached += len(tokens)

    def _pieces(self, start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield where pieces of a prompt begin and end, of at most so many tokens."""
        return ((place, min(place + most, end)) for place in range(start, end, most))

    def _cell(self, index: int) -> int:
        """Return the position in the cache of the text's token `index`."""
        return index

    def _index(self, cell: int) -> int:
        """Return which token of the text has this position in the cache."""
        return cell

    def _fed(self, tokens: list[int]) -> list[int]:
        """Return the model's inputs for these tokens."""
        return tokens

    def _evaluate_at(
        self, start: int, tokens: list[int], parents: tuple[int, ...]
    ) -> EvaluatedRows:
        """Evaluate a root in the cell `start`, and below it the tree of the other tokens."""
        known = self._known
        layout = known[1] if known and known[0] is parents else self._layout(parents)
        if self._inputs is not None and self._inputs.takes(tokens):
            return self._evaluate_embedded(self._inputs, start, tokens, layout)
        self._batch.fill_shape(tokens, start, layout.shape)
        return self.context.decode(self._batch)

    def _layout(self, parents: tuple[int, ...]) -> TreeLayout:
        """Return the layout of a tree that is to be evaluated; raises for one that cannot be."""
        known = self._known
        if known is not None and known[0] is parents:  # a tuple's hash is not kept
            return known[1]
        layout = layout_tree(parents, self._n_sequences, self._first_id)
        if parents and not self._can_branch:
            self._require_chain(len(parents), layout)
        if layout.n_leaves > self._n_sequences:
            there = f"the context's {self._n_sequences} sequences"
            raise OptionError(f"a draft tree with more leaves than {there}")
        self._known = parents, layout
        return layout

    def _embedding_batch(self) -> EmbeddingBatch:
        """Return a batch for the largest evaluation with a tree."""
        from specrun.bindings.contexts.embedding_inputs import EmbeddingBatch

        capacity = min(self.context.n_batch, self.context.n_outputs)
        return EmbeddingBatch(capacity, self._n_sequences, self.context.model.n_embd)

    def _evaluate_embedded(
        self, inputs: EmbeddingInputs, start: int, tokens: list[int], layout: TreeLayout
    ) -> EvaluatedRows:
        """Evaluate tokens, some of which are none, as embeddings."""
        batch = self._embedded
        assert batch is not None
        rows = inputs.rows(tokens)
        batch.fill_shape([0] * len(tokens), start, layout.shape)
        batch.give(rows)
        return self.context.decode(batch)

    def _keep_at(self, root: int, parents: tuple[int, ...], path: Sequence[int]) -> None:
        """Keep the cell `root` and the nodes of `path` below it, for every sequence."""
        known, memory = self._known, self.context.memory
        if known is not None and known[0] is parents:
            layout = known[1]
        else:
            layout = layout_tree(parents, self._n_sequences, self._first_id)
        end = root + 1 + len(path)
        # Before anything is changed: it raises if this is no path.
        moves = moves_onto(tuple(path), parents, self._n_sequences, self._first_id) if path else ()
        if layout.depth > len(path):  # deeper cells are dropped
            self._drop(end)
        if moves:
            # Its last node's sequences hold the whole path: the others take over the cells that
            # they lack. Each move walks all cells of the context: sequences that hold the path make
            # none.
            source = layout.ids[path[-1]][0]
            memory.follow(source, root + 1, end, moves)

    def _require_chain(self, n_nodes: int, layout: TreeLayout) -> None:
        """Raise `UnsupportedModelError` unless a recurrent state can take back the whole tree."""
        context = self.context
        most = self.max_nodes if context.memory.spare is not None else context.memory.n_rollback
        if layout.n_leaves > 1 or n_nodes > most:
            kind = f"{context.model.architecture} models keep a recurrent state"
            limit = f"this context verifies chains of at most {most} drafts"
            raise UnsupportedModelError(f"{kind}: {limit}")


def checkpoint_places(controls: Sequence[int], start: int, end: int) -> frozenset[int]:
    """Return after how many tokens of a prompt, read from `start` to `end`, its state is kept.

    Control tokens (`controls` are their places) stand at the borders of messages. So a state before
    the first of some that stand together is one that the next turn of a chat, and an edited or
    repeated message, goes on from. If none are, it is kept now and then, and at the end.
    """
    places: list[int] = []
    last_control, last = start - _NEAREST_CHECKPOINTS, start
    for place in (*controls, end):
        while place - last > _FURTHEST_CHECKPOINTS:
            last += _FURTHEST_CHECKPOINTS
            places.append(last)
        if place - last_control >= _NEAREST_CHECKPOINTS and place > start:
            places.append(place)
            last = place
        last_control = place
    return frozenset(places)


def most_tokens(drafter: DraftSize) -> int:
    """Return how many tokens an evaluation has at most: a root, a drafter's tree, pending ones."""
    pending = min(_PENDING_ROWS, drafter.max_nodes - 1) if drafter.max_leaves > 1 else 0
    return drafter.max_nodes + 1 + pending


def target_context_options(options: ContextOptions, drafter: DraftSize) -> ContextOptions:
    """Return the settings of a context that verifies this drafter's trees."""
    # No more than one evaluation takes: the graph reserves memory for every output row.
    rows = most_tokens(drafter)
    return dataclasses.replace(
        options,
        n_sequences=drafter.max_leaves,
        n_outputs=max(rows, _HIDDEN_STATE_ROWS) if drafter.needs_hidden_states else rows,
        hidden_states=drafter.needs_hidden_states,
        layer_inputs=drafter.layer_inputs,
        nextn_states=drafter.needs_nextn_states,
        n_rollback=drafter.max_nodes,
    )
