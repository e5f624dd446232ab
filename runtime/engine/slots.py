"""Slots: conversations in one context of the target, their cells, and their common evaluation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch, BatchShape, chain_shape
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.memory import copy_sequence, place_sequence
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.runtime.drafters.batching import DraftMeeting
from specrun.runtime.round.target import (
    CachedText,
    EvaluatedRows,
    PlacedRows,
    PromptLearner,
    TargetModel,
)
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.layout import FILLER, Arrangement
from specrun.runtime.trees.tree import DraftTree

if TYPE_CHECKING:
    from specrun.bindings.contexts.rows import Rows
    from specrun.runtime.planning import CostCurve

# == Cells of a shared KV cache: which positions of which slots lie in the same cells ==============
#
# A prompt's prefix that another slot has cached is shared, not evaluated again: its cells then
# belong to both. The cells in use are counted here: llama.cpp has no function for that, and refuses
# an evaluation that finds too few.


class Run(NamedTuple):
    """Positions start <= p < end of a slot, which lie in cells of one block.

    A block's cells were filled one after the other by one text: slots that share a part of a block
    share it from its start.
    """

    block: int
    start: int
    end: int


class SlotCells:
    """The cells of one slot, as runs that cover its cached positions in order."""

    _blocks = itertools.count()

    def __init__(self) -> None:
        self._shared: list[Run] = []
        self._own = next(self._blocks)  # the block of the positions behind them

    def runs(self, n_cached: int) -> list[Run]:
        """Return the runs of a slot that has cached so many positions."""
        runs = _cut(self._shared, n_cached)
        start = self._shared[-1].end if self._shared else 0
        if n_cached > start:
            runs.append(Run(self._own, start, n_cached))
        return runs

    def cut(self, n_cached: int, length: int) -> None:
        """Note that of `n_cached` positions those from `length` on were dropped."""
        if length < n_cached:
            self._shared = _cut(self.runs(n_cached), length)
            # New positions lie in other cells than those that other slots may still share.
            self._own = next(self._blocks)

    def share(self, other: SlotCells, n_cached: int, length: int) -> None:
        """Note that the first `length` of another slot's `n_cached` positions are shared."""
        self._shared = _cut(other.runs(n_cached), length)
        self._own = next(self._blocks)


def count_cells(runs: Iterable[Run]) -> int:
    """Return how many cells the runs of all slots lie in."""
    sizes: dict[int, int] = {}
    for block, start, end in runs:
        sizes[block] = max(sizes.get(block, 0), end - start)
    return sum(sizes.values())


def _cut(runs: Iterable[Run], length: int) -> list[Run]:
    """Return the parts of runs before position `length`."""
    kept = (run for run in runs if run.start < min(run.end, length))
    return [Run(block, start, min(end, length)) for block, start, end in kept]


# == Slots =========================================================================================
#
# Each of several slots has sequence ids of its own, so their trees lie side by side in one batch,
# and none attends to another's tokens. A slot's tree waits until `SharedEvaluation.evaluate` is
# called; then each slot takes its own rows. (A single slot has a context of its own.)
#
# The cells of every text lie in the order of its positions, as plain decoding leaves them
# (`target`). llama.cpp puts new tokens into the first free cells, so a cell that one text drops
# must not become free while another text has cells behind it. Dropped cells are parked: they stay
# in use, for a sequence that no token has and none attends to, and new tokens always go behind all
# others. When cells run short, `SharedEvaluation.make_room` copies the texts together and frees the
# parked cells.
#
# Texts of models with a recurrent state lie apart, each in cells of its own, and nothing is parked:
# such sequences cannot share cells. llama.cpp evaluates only neighbouring sequences of equal length
# at once. If it evaluated a batch in parts, it could move a state between two of them, and the
# states to go back to would be lost. So the shorter of neighbours are filled up with tokens that
# nobody reads and `commit` drops, and all others wait for the next turn. All of them are filled up
# further if a wider evaluation takes less time.
#
# Drafters that stop if drafting does not pay measure their rounds by `SlotClock`. Of an evaluation
# of k texts and N tokens a slot is charged an equal part of its cost without drafts, T(k), and its
# own drafts' part of the cost that all drafts add, T(N) - T(k). So the same drafts cost more, and
# are stopped, if many conversations draft.


_SHORT_PROMPT = 32
_MOST_COPIED = 7 / 8  # of the context: texts that fill more of it are not copied together
_PIECES = (256, 192, 128, 96, 64)

StepsWider = Callable[[int, int, int], int]
"""Returns how many tokens to evaluate in place of the first number: at most the second, and more by
a multiple of the third."""


@dataclass(frozen=True, slots=True)
class PendingTree:
    """The tokens of a round, from position `start` on; its rows lie at `places` among them."""

    tokens: list[int]
    start: int
    shape: BatchShape
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class EvaluationCost:
    """The evaluation of a round: `tokens` of this conversation, among `together` of all `texts`.

    `expected_s` is T(together) by the cost curve that drafts are planned with, `single_s` is T(1).
    """

    tokens: int
    together: int
    texts: int
    expected_s: float
    single_s: float


class SlotClock:
    """Seconds of each slot: its own work, and its part of evaluations; others' do not count."""

    def __init__(self) -> None:
        self._spent: dict[object, float] = {}
        self._now: object = None
        self._since = 0.0

    def __call__(self) -> float:
        """Return the seconds of the slot that is worked for now."""
        return self._spent.get(self._now, 0.0) + time.perf_counter() - self._since

    @contextmanager
    def working_for(self, slot: object) -> Iterator[None]:
        """Charge the time of the `with` block to a slot."""
        self._now, self._since = slot, time.perf_counter()
        try:
            yield
        finally:
            self.add(slot, time.perf_counter() - self._since)
            self._now, self._since = None, time.perf_counter()

    def add(self, slot: object, seconds: float) -> None:
        """Charge seconds to a slot."""
        self._spent[slot] = self._spent.get(slot, 0.0) + seconds


class SlotTarget(TargetModel):
    """The target of one slot: sequences of its own in a shared context.

    `evaluate` keeps the tree as `pending` and returns None until the shared evaluation was made.
    """

    def __init__(self, shared: SharedEvaluation, sequences: range) -> None:
        super().__init__(shared.context, sequences=sequences)
        self.text = CachedText()  # whose tokens are cached here: the slot's conversation
        self._shared = shared
        self._cells = SlotCells()
        self.pending: PendingTree | None = None
        self._n_filled = 0  # the tokens behind the tree of the last evaluation
        self.last_evaluated = 0
        self._outcome: EvaluatedRows | SpecrunError | None = None
        self._native_s = 0.0

    @property
    def native_seconds(self) -> float:
        """Seconds of native evaluation: of shared ones, this slot's share by tokens."""
        return self._native_s

    @property
    def graphs_reused(self) -> None:
        """None: the shapes of evaluations are those of several texts."""
        return None

    @property
    def n_positions(self) -> int:
        """The most tokens that a text may have."""
        return self._shared.n_positions

    @property
    def max_nodes(self) -> int:
        """The most nodes of a tree: the slot's share of the tokens that one evaluation takes."""
        share = self._most_tokens // len(self._shared.slots) - 1
        return max(0, min(super().max_nodes, share))

    @property
    def longest_piece(self) -> int:
        """The most tokens of a prompt that are evaluated at once: others wait for them."""
        return min(super().longest_piece, self._shared.longest_piece)

    @property
    def n_waiting(self) -> int:
        """How many tokens wait to be evaluated with those of other slots."""
        return len(self.pending.tokens) if self.pending is not None else 0

    @property
    def runs(self) -> list[Run]:
        """The cells that its text lies in."""
        return self._cells.runs(self.text.n_cached)

    # Only the loop evaluates in slots, and it can wait.
    def evaluate(  # type: ignore[override]
        self, text: CachedText, tree: DraftTree
    ) -> EvaluatedRows | None:
        """Let the text's last token and a tree wait; after the evaluation return their rows.

        Raises the error of the shared evaluation.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            if self.pending is None:
                tokens, parents, places = self._in_order(text, tree)
                shape = self._layout(parents).shape
                rows_at = places or range(len(tokens))
                self.pending = PendingTree(tokens, text.n_cached, shape, rows_at)
            return None
        if isinstance(outcome, SpecrunError):
            raise outcome
        return outcome

    def prefill_pieces(
        self, text: CachedText, end: int, learn: PromptLearner | None = None
    ) -> Iterator[None]:
        """Evaluate the text's tokens up to `end`, a piece at a time, in batches of their own."""
        pieces = super().prefill_pieces(text, end, learn)
        while True:
            before, start = self.context.native_seconds, text.n_cached
            self._shared.make_room(min(end - start, self.longest_piece))
            if next(pieces, self) is self:
                return
            self._shared.n_cells_taken += text.n_cached - start
            self._native_s += self.context.native_seconds - before
            yield

    def fill_up(self, width: int) -> None:
        """Let the pending chain be followed by tokens that nobody reads, up to a width."""
        pending = self.pending
        if pending is None:
            return
        self._n_filled = width - len(pending.tokens)
        if self._n_filled:
            tokens = [*pending.tokens, *[FILLER] * self._n_filled]
            shape = chain_shape(width, self._all_ids, width)
            self.pending = dataclasses.replace(pending, tokens=tokens, shape=shape)

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        """Keep root and `path`, and drop all other nodes."""
        n_filled, self._n_filled = self._n_filled, 0
        if n_filled and len(path) == len(tree.tokens):  # otherwise they go with refused nodes
            self._drop(text.n_cached + 1 + len(path))
        super().commit(text, tree, path)

    def take(self, outcome: EvaluatedRows | SpecrunError, seconds: float = 0.0) -> None:
        """Take the rows of the pending tree, or the error, and the slot's part of the seconds."""
        self.pending, self._outcome = None, outcome
        self._native_s += seconds

    def withdraw(self) -> None:
        """Drop the pending tree: the answer has ended."""
        self.pending = self._outcome = None
        self._n_filled = 0

    @property
    def has_lost_cache(self) -> bool:
        """Whether the cache holds less of the text than its number of cached tokens.

        A failed evaluation of other texts clears a memory with recurrent states.
        """
        last = self.context.memory.last_position(self._first_id)
        return last + 1 < self.text.n_cached

    def rewind(self, text: CachedText, length: int) -> None:
        """Drop everything of the text after its first `length` tokens."""
        n_cached = text.n_cached
        super().rewind(text, length)
        self._cells.cut(n_cached, text.n_cached)

    def _arranged(self, text: CachedText, tree: DraftTree) -> Arrangement | None:
        """Return None: parked cells keep the text's order."""
        if text.n_cached < len(text.tokens) - 1:
            cached = f"of {len(text.tokens)} tokens {text.n_cached} are cached"
            raise OptionError(f"{cached}: a tree grows from the first that is not")
        return None

    def _catch_up(self, text: CachedText, end: int) -> None:
        """Evaluate tokens that are not cached, up to `end`, in batches of their own."""
        n_cells = max(0, end - text.n_cached)
        self._shared.make_room(n_cells)
        super()._catch_up(text, end)
        self._shared.n_cells_taken += n_cells

    def _drop(self, start: int) -> None:
        """Drop all positions from `start` on, for every sequence of the text."""
        for sequence in self._all_ids:
            self._park(sequence, start)
        super()._drop(start)

    def _keep_at(self, root: int, parents: tuple[int, ...], path: Sequence[int]) -> None:
        """Keep the cell `root` and the nodes of `path` below it, for every sequence."""
        layout = self._layout(parents)
        for sequence, deepest in enumerate(layout.deepest[: layout.n_leaves], self._first_id):
            shared = sum(sequence in layout.ids[node] for node in path)
            if deepest > shared:
                self._park(sequence, root + 1 + shared)
        super()._keep_at(root, parents, path)

    def _park(self, sequence: int, start: int) -> None:
        """Keep the cells of positions from `start` on in use, also when a sequence drops them."""
        if self._shared.parking is not None:
            self.context.memory.branch(sequence, self._shared.parking, start)

    def copied(self) -> npt.NDArray[np.uint8]:
        """Return a copy of the keys and values of the text."""
        return copy_sequence(self.context, self._first_id)

    def place(self, data: npt.NDArray[np.uint8], n_cached: int) -> None:
        """Put a copy by `copied` into free cells of an empty cache."""
        place_sequence(self.context, data, self._first_id)
        for sequence in self._all_ids[1:]:
            self.context.memory.branch(self._first_id, sequence)
        self._cells = SlotCells()
        self.text.n_cached = n_cached

    def leave_cache(self) -> None:
        """Drop the cache of the text, which keeps its tokens: it is to be read again."""
        n_cached = self.text.n_cached
        self.text.n_cached = 0
        self._drop(0)
        self._cells.cut(n_cached, 0)

    def take_over(self, other: SlotTarget, length: int) -> None:
        """Share the cells of another slot's first `length` tokens, in place of all it has.

        Texts that lie apart are copied.
        """
        self.rewind(self.text, 0)
        memory, source = self.context.memory, other._first_id
        if self._shared.parking is None:
            self._copy(other)
            self.rewind(self.text, length)
            return
        for sequence in self._all_ids:
            memory.branch(source, sequence, 0, length)
        self._cells.share(other._cells, other.text.n_cached, length)
        self.text.tokens = other.text.tokens[:length]
        self.text.n_prompt = min(other.text.n_prompt, length)
        self.text.n_cached = length

    def _copy(self, other: SlotTarget) -> None:
        """Take a copy of all that another slot has cached, with its checkpoints."""
        try:
            self.place(other.copied(), 0)
        except SpecrunError:  # no memory for a copy: the prompt is read
            self.leave_cache()
            return
        checkpoints = self.context.memory.checkpoints
        if checkpoints is not None:
            checkpoints.share(other._first_id, self._first_id)
        self.text.tokens = other.text.tokens[: other.text.n_cached]
        self.text.n_prompt = min(other.text.n_prompt, other.text.n_cached)
        self.text.n_cached = other.text.n_cached


class SharedEvaluation:
    """One context of the target with several slots, and the evaluation that they share.

    The context has `n_slots` times the sequences and output rows that one drafter's trees need, and
    one sequence more, `parking`, for cells that were dropped and are not free yet (`slot_options`);
    None: texts lie apart. No text is longer than `n_positions`. The slots' drafters draft together
    at `meeting`. Evaluations of the numbers of tokens in `widths` are filled up, in a second
    sequence more; those of texts that lie apart to `wider` and cheaper ones. `n_cells_taken`
    counts the cells before the first of those that no token has taken since the texts were last
    copied together.
    """

    def __init__(
        self,
        context: Context,
        n_slots: int,
        n_positions: int,
        curve: CostCurve,
        clock: SlotClock,
        meeting: DraftMeeting | None = None,
        widths: Mapping[int, int] | None = None,
        wider: StepsWider = lambda n, *_: n,
    ) -> None:
        self.context, self.clock = context, clock
        self.meeting = meeting or DraftMeeting(n_slots)
        self._curve = curve
        apart = context.options.apart
        self.n_positions = min(n_positions, context.n_ctx // n_slots if apart else context.n_ctx)
        self.longest_piece = longest_piece(curve)
        # One sequence more is parking's, and a second one is that of tokens which fill batches up.
        n_ids = 1 if apart else (context.options.n_sequences - 1) // n_slots
        self.parking = None if apart else n_ids * n_slots
        self._widths, self._wider = widths or {}, functools.lru_cache(4096)(wider)
        self._n_evaluations = 0
        self.n_cells_taken = 0
        self.slots: list[SlotTarget] = []
        self._rows = Batch(context.n_batch, context.options.n_sequences)
        self._last = (0, 0)  # the last evaluation's tokens and texts
        for index in range(n_slots):
            self.slots.append(SlotTarget(self, range(index * n_ids, (index + 1) * n_ids)))

    @property
    def n_cells_used(self) -> int:
        """How many cells of the cache hold a committed token of a slot."""
        return count_cells(run for slot in self.slots for run in slot.runs)

    @property
    def n_cells_free(self) -> int:
        """How many cells are free; if texts lie apart, each has room for its own."""
        used = 0 if self.parking is None else self.n_cells_used
        return self.context.n_ctx - used

    def _together(self, slots: Sequence[SlotTarget]) -> Sequence[SlotTarget]:
        """Return those of waiting slots that one evaluation can serve, in llama.cpp's order.

        That is all of them, or if texts lie apart neighbours of the one that waits for longest.
        """
        if self.parking is not None or not slots:
            return slots
        waiting = {self.slots.index(slot): slot for slot in slots}
        first = min(slots, key=lambda slot: slot.last_evaluated)
        chosen = [first]
        most = min(self.context.n_batch, self.context.options.n_ubatch)
        for step in (1, -1):
            place = self.slots.index(first) + step
            while place in waiting:
                more = [*chosen, waiting[place]]
                width = max(slot.n_waiting for slot in more)
                longest = max(slot.text.n_cached for slot in more)
                if longest + width > self.n_positions or width * len(more) > most:
                    break
                chosen = more
                place += step
        return sorted(chosen, key=self.slots.index)

    def evaluate(self, slots: Sequence[SlotTarget]) -> Sequence[SlotTarget]:
        """Evaluate the pending trees of slots in one batch; each takes its rows, or the error.

        Returns the slots that were served: the trees of others may have to wait. Rows are valid
        until anything else is evaluated.
        """
        slots = self._together([slot for slot in slots if slot.n_waiting])
        if not slots:
            return slots
        counts = {slot: slot.n_waiting for slot in slots}
        width = self._width(slots) if self.parking is None else 0
        self._n_evaluations += 1
        for slot in slots:
            slot.last_evaluated = self._n_evaluations
            if self.parking is None:
                slot.fill_up(width)
        pending = [(slot, slot.pending) for slot in slots if slot.pending is not None]
        n_tokens = sum(len(each.tokens) for _, each in pending)
        self.make_room(n_tokens)
        texts = [(each.tokens, each.start, each.shape) for _, each in pending]
        before = self.context.native_seconds
        try:
            rows = self._decode(texts, n_tokens)
        except SpecrunError as problem:
            for slot, _ in pending:
                slot.take(problem)
            return slots
        self.n_cells_taken += n_tokens
        self._last = n_tokens, len(pending)
        parts = self._parts([counts[slot] for slot, _ in pending])
        seconds, place = self.context.native_seconds - before, 0
        for (slot, each), part in zip(pending, parts, strict=True):
            n = len(each.tokens)
            places = [place + own for own in each.places]
            slot.take(PlacedRows(rows, places), seconds * part)
            self.clock.add(slot, seconds * part)
            place += n
        return slots

    def _width(self, slots: Sequence[SlotTarget]) -> int:
        """Return how many tokens each of several texts that lie apart is evaluated with."""
        n, width = len(slots), max(slot.n_waiting for slot in slots)
        context = self.context
        room = self.n_positions - max(slot.text.n_cached for slot in slots)
        most = min(context.n_batch, context.options.n_ubatch, context.n_outputs) // n
        most = min(most, 1 + context.memory.n_rollback, room)
        return self._wider(n * width, n * max(width, most), n) // n

    def _decode(self, texts: list[tuple[list[int], int, BatchShape]], n_tokens: int) -> Rows:
        """Evaluate texts side by side, in a batch that is filled up if that takes less time.

        The filling is a text of its own, behind all others, whose cells are free again at once.
        """
        width = self._widths.get(n_tokens, 0)
        room = self.context.n_ctx - self.n_cells_taken
        if self.parking is None or not n_tokens < width <= room:
            self._rows.fill_shapes(texts)
            return self.context.decode(self._rows)
        count, filling = width - n_tokens, self.parking + 1
        self._rows.fill_shapes([*texts, ([FILLER] * count, 0, _filler(count, filling))])
        try:
            return self.context.decode(self._rows)
        finally:
            self.context.memory.truncate(0, -1, filling)

    def make_room(self, n_cells: int) -> None:
        """Free parked cells if no more than `n_cells` are free behind all others.

        Texts that fill most of the context are not copied: they would have to be again soon. New
        tokens then go into parked cells, and those of a text lie in another order from then on.
        """
        n_ctx = self.context.n_ctx
        if self.parking is None or self.n_cells_taken + n_cells <= n_ctx:
            return
        used = sum(slot.text.n_cached for slot in self.slots)
        if used + n_cells <= n_ctx * _MOST_COPIED:
            self._copy_together()
        else:
            self.context.memory.truncate(0, -1, self.parking)
            self.n_cells_taken = n_ctx

    def _copy_together(self) -> None:
        """Bring every text into cells one behind the other, and free all other cells."""
        cached = [(slot, slot.text.n_cached) for slot in self.slots if slot.text.n_cached]
        copies = [slot.copied() for slot, _ in cached]
        # An interrupt at any line leaves numbers that are true.
        for slot, _ in cached:
            slot.text.n_cached = 0
        self.context.memory.clear()
        for (slot, n_cached), data in zip(cached, copies, strict=True):
            slot.place(data, n_cached)
        self.n_cells_taken = sum(n_cached for _, n_cached in cached)

    def last_cost(self, n_tokens: int) -> EvaluationCost:
        """Return the cost of the last evaluation, in which a slot had so many tokens."""
        together, texts = self._last
        curve = self._curve
        return EvaluationCost(n_tokens, together, texts, curve.seconds(together), curve.seconds(1))

    def _parts(self, counts: Sequence[int]) -> list[float]:
        """Return the part of an evaluation's cost that each slot's tokens are charged."""
        k, n_tokens = len(counts), sum(counts)
        whole, plain = self._curve.seconds(n_tokens), self._curve.seconds(k)
        # Noise and padding can make more tokens cheaper.
        plain = min(plain, whole)
        added = (whole - plain) / (n_tokens - k) if n_tokens > k else 0.0
        return [(plain / k + added * (n - 1)) / whole for n in counts]


@functools.lru_cache(maxsize=64)
def _filler(count: int, sequence: int) -> BatchShape:
    """Return the shape of tokens that nobody reads."""
    return BatchShape.of(range(count), [[sequence]] * count, [1] * count)


def slot_options(
    own: ContextOptions, n_slots: int, *, can_branch: bool, fills: bool = False
) -> ContextOptions:
    """Return the settings of a context for several slots, each of which needs those of `own`.

    It has a sequence more if batches that are shared are filled up.
    """
    if can_branch:
        n_sequences = own.n_sequences * n_slots + 1 + fills
        return dataclasses.replace(own, n_sequences=n_sequences)
    return dataclasses.replace(own, n_sequences=n_slots, apart=True)


def longest_piece(curve: CostCurve) -> int:
    """Return how many tokens of a prompt are read at once while others may wait.

    As many as take no longer than two short prompts: a short request that comes while a long prompt
    is read waits for one piece of it, and should wait little longer than alone.
    """
    most = 2.0 * curve.seconds(_SHORT_PROMPT)
    return next((n for n in _PIECES if curve.seconds(n) <= most), _SHORT_PROMPT)


def longest_prefix(
    slots: Sequence[tuple[TargetModel, CachedText]], prompt: Sequence[int]
) -> tuple[int | None, int]:
    """Return which text's cache begins like the prompt for longest, and for how many tokens."""
    best: int | None = None
    most = 0
    for index, (target, text) in enumerate(slots):
        shared = min(common_prefix(text.tokens, prompt), len(prompt) - 1)
        length = target.returns_to(text, shared) if shared > most else 0
        if length > most:
            best, most = index, length
    return best, most
