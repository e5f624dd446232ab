"""Drafts of several conversations: evaluations of draft models and heads for all of them at once.

Requests (`Shared.ask`) are evaluated together when the engine starts it, `DraftMeeting.evaluate`.
Of a draft model there is one context, with sequences for each conversation. A conversation's
drafter sees a `ContextPart`: a context with nothing in it but its own text. Its `decode` evaluates
at once, alone.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.memory import (
    ALL_SEQUENCES,
    Memory,
    Moves,
    copy_sequence,
    place_sequence,
)
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.runtime.round.target import PlacedRows

if TYPE_CHECKING:
    from specrun.bindings.models.model import Model

MOST_SEQUENCES = 256
"""llama.cpp's limit (LLAMA_MAX_SEQ) for one context."""


GivenT = TypeVar("GivenT")
FoundT = TypeVar("FoundT")


class Shared(Generic[GivenT, FoundT]):
    """A conversation's evaluations that are made with others' by something `joint`: one at a time.

    `given` are the inputs of the last one, which nobody changes before it is made. `native_seconds`
    is the share of the time of all so far.
    """

    given: GivenT

    def __init__(self, joint: Joint[Any]) -> None:
        self._joint, self.native_seconds = joint, 0.0
        self._answered: FoundT | SpecrunError | None = None

    @property
    def waits(self) -> bool:
        """Whether others draft at the same time, whom it is worth to wait for."""
        return self._joint.waits

    def ask(self, given: GivenT) -> None:
        """Request an evaluation."""
        self.given, self._answered = given, None
        self._joint.asking.append(self)

    def answer(self, answered: FoundT | SpecrunError, seconds: float) -> None:
        """Take the result of the request, or the error, and the share of an evaluation's time."""
        self._answered = answered
        self.native_seconds += seconds

    def answered(self) -> FoundT | None:
        """Return the result of the request, None before; raises the error of the evaluation."""
        answered, self._answered = self._answered, None
        if isinstance(answered, SpecrunError):
            raise answered
        return answered

    def withdraw(self) -> None:
        """Withdraw the request."""
        self._answered = None
        if self in self._joint.asking:
            self._joint.asking.remove(self)


SharedT = TypeVar("SharedT", bound=Shared[Any, Any])


class Joint(ABC, Generic[SharedT]):
    """A draft model or heads that conversations share, and the requests that wait for them."""

    def __init__(self, meeting: DraftMeeting) -> None:
        self.meeting = meeting
        self.asking: list[SharedT] = []
        meeting.joint.append(self)

    @property
    def waits(self) -> bool:
        """Whether others draft at the same time, so that it is worth to wait for them."""
        return self.meeting.n_drafting > 1

    def evaluate(self) -> float:
        """Evaluate the first requests, as many as fit; return the seconds."""
        taken = self.fitting()
        del self.asking[: len(taken)]
        try:
            answers, shares = self.answers(taken)
        except SpecrunError as problem:
            for request in taken:
                request.answer(problem, 0.0)
            return 0.0
        for request, own, seconds in zip(taken, answers, shares, strict=True):
            request.answer(own, seconds)
        return sum(shares)

    @abstractmethod
    def fitting(self) -> list[SharedT]:
        """Return the first requests that fit one evaluation."""

    @abstractmethod
    def answers(self, taken: Sequence[SharedT]) -> tuple[Sequence[object], Sequence[float]]:
        """Evaluate requests; return the result of each, and its share of the seconds."""

    def close(self) -> None:
        """Leave the meeting; again does nothing."""
        if self in self.meeting.joint:
            self.meeting.joint.remove(self)


class DraftMeeting:
    """The draft models and heads of an engine, and the requests of its conversations.

    `n_drafting` is how many conversations draft now: if it is one, nothing is waited for. Each
    one's share of an evaluation follows from it, so drafts shrink with the load.
    """

    def __init__(self, n_texts: int) -> None:
        self.n_texts = n_texts
        self.n_drafting = 1
        self.joint: list[Joint[Any]] = []

    def evaluate(self) -> float:
        """Evaluate the requests, as many as fit each one's batch; return the seconds."""
        return sum(joint.evaluate() for joint in self.joint if joint.asking)


class SharedDraftContext(Joint["ContextPart"]):
    """A draft model's context: `n_parts` times the cells, sequences and rows of `options`.

    `make` opens it.
    """

    def __init__(
        self,
        meeting: DraftMeeting,
        model: Model,
        options: ContextOptions,
        n_parts: int,
        make: Callable[[Model, ContextOptions], Context],
    ) -> None:
        self.own = options
        self.context = make(
            model,
            dataclasses.replace(
                options,
                n_ctx=options.n_ctx * n_parts,
                n_sequences=options.n_sequences * n_parts,
                n_outputs=max(options.n_outputs, options.n_sequences) * n_parts,
            ),
        )
        self._free = [*range(n_parts)]
        self.batch = self.new_batch()
        super().__init__(meeting)

    def new_batch(self) -> Batch:
        """Return the batch of shared evaluations."""
        return Batch(self.context.n_batch, self.own.n_sequences)

    def part(self, *, copies: bool) -> ContextPart | None:
        """Return a part that nobody has, None if there is none left.

        `copies`: its rows are to outlive evaluations of others.
        """
        return self.new_part(self._free.pop(0), copies=copies) if self._free else None

    def new_part(self, number: int, *, copies: bool) -> ContextPart:
        """Return the part with a number, which nobody has."""
        return ContextPart(self, number, copies=copies)

    def give_back(self, part: ContextPart) -> None:
        """Take back a part, and drop its cells."""
        part.withdraw()
        if self.context.is_open:
            part.memory.clear()
        self._free.append(part.number)

    def fitting(self) -> list[ContextPart]:
        """Return the first parts whose requests fit a batch."""
        taken: list[ContextPart] = []
        n_tokens = n_outputs = 0
        for part in self.asking:
            n_tokens, n_outputs = n_tokens + part.given.n_tokens, n_outputs + part.given.n_outputs
            full = n_tokens > self.context.n_batch or n_outputs > self.context.n_outputs
            if taken and full:
                break
            taken.append(part)
        return taken

    def answers(self, taken: Sequence[ContextPart]) -> tuple[list[Rows], list[float]]:
        """Evaluate the requests side by side; return the rows of each, and its seconds."""
        rows, seconds = self.decode(taken)
        ends = [*accumulate((part.given.n_outputs for part in taken), initial=0)]
        own = [cast("Rows", PlacedRows(rows, range(*pair))) for pair in pairwise(ends)]
        n = sum(part.given.n_tokens for part in taken)
        return own, [seconds * part.given.n_tokens / n for part in taken]

    def decode(self, parts: Sequence[ContextPart]) -> tuple[Rows, float]:
        """Evaluate the batches of parts side by side; return all rows and the seconds."""
        self.fill(parts)
        before = self.context.native_seconds
        rows = self.context.decode(self.batch)
        return rows, self.context.native_seconds - before

    def fill(self, parts: Sequence[ContextPart]) -> None:
        """Fill the shared batch with those of parts, in the sequences of each."""
        batches = [part.given for part in parts]
        counts = [batch.id_counts[: batch.n_tokens] for batch in batches]
        ids = [
            batch.ids[: int(count.sum())] + part.first
            for part, batch, count in zip(parts, batches, counts, strict=True)
        ]
        self.batch.fill(
            np.concatenate([batch.tokens[: batch.n_tokens] for batch in batches]),
            np.concatenate([batch.positions[: batch.n_tokens] for batch in batches]),
            np.concatenate(counts),
            np.concatenate(ids),
            np.concatenate([batch.outputs[: batch.n_tokens] for batch in batches]),
        )

    def close(self) -> None:
        """Free the native memory; again does nothing."""
        super().close()
        self.context.close()


class ContextPart(Context, Shared[Batch, Rows]):
    """The part of one conversation in a shared context: sequences of its own, numbered from 0."""

    # Not Context's own beginning: there is no native context to make.
    def __init__(self, shared: SharedDraftContext, number: int, *, copies: bool) -> None:
        Shared.__init__(self, shared)
        self._shared, self.number = shared, number
        self.model, self.options = shared.context.model, shared.own
        self.n_ctx, self.n_batch = shared.own.n_ctx, shared.context.n_batch
        self.n_outputs = max(shared.own.n_outputs, shared.own.n_sequences)
        self.first = number * shared.own.n_sequences
        self.memory: Memory = MemoryPart(shared.context.memory, self.first, shared.own.n_sequences)
        self._copies = copies
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether neither it nor the shared context was closed."""
        return not self._closed and self._shared.context.is_open

    def answer(self, answered: Rows | SpecrunError, seconds: float) -> None:
        """Take the rows of the request, copied if others' evaluations must leave them alone."""
        if self._copies and not isinstance(answered, SpecrunError):
            answered = cast("Rows", _CopiedRows(answered, self.given.n_outputs))
        super().answer(answered, seconds)

    def decode(self, batch: Batch) -> Rows:
        """Evaluate a batch at once, alone."""
        self.given = batch
        rows, seconds = self._shared.decode([self])
        self.native_seconds += seconds
        return cast("Rows", _CopiedRows(rows, batch.n_outputs)) if self._copies else rows

    def share(self, other: Context, end: int) -> None:
        """Let sequence 0 of another part hold the first `end` positions, in the same cells."""
        assert isinstance(other, ContextPart)
        self._shared.context.memory.branch(self.first, other.first, 0, end)

    def stepper(self, batch: Batch) -> None:
        """Return None: evaluations of several conversations are made at once."""

    def close(self) -> None:
        """Give it back: its text is dropped. Again does nothing."""
        if not self._closed:
            self._closed = True
            self._shared.give_back(self)


class MemoryPart(Memory):
    """The cached positions of one part's sequences, numbered from 0."""

    # Not Memory's own beginning: it is the shared context's, which checks all arguments.
    def __init__(self, memory: Memory, first: int, n_sequences: int) -> None:
        self._memory, self._first, self._n_own = memory, first, n_sequences
        self.n_rollback = memory.n_rollback

    def truncate(self, start: int, end: int = -1, sequence: int = ALL_SEQUENCES) -> None:
        """Drop positions start <= p < end of one sequence, or of all of the part's."""
        for each in range(self._n_own) if sequence == ALL_SEQUENCES else (sequence,):
            self._memory.truncate(start, end, self._placed(each))

    def branch(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Let sequence `target` share the cached positions start <= p < end of `source`."""
        self._memory.branch(self._placed(source), self._placed(target), start, end)

    def follow(self, source: int, first: int, end: int, moves: Moves) -> None:
        """Let sequences share the cells that they lack of some positions of `source`."""
        placed = [(self._placed(own), shared, strays) for own, shared, strays in moves]
        self._memory.follow(self._placed(source), first, end, placed)

    def keep(self, sequence: int) -> None:
        """Drop every other sequence of the part."""
        for each in range(self._n_own):
            if each != sequence:
                self._memory.truncate(0, -1, self._placed(each))

    def clear(self) -> None:
        """Drop everything of the part."""
        self.truncate(0)

    def last_position(self, sequence: int = 0) -> int:
        """Return the highest cached position of a sequence, -1 if it is empty."""
        return self._memory.last_position(self._placed(sequence))

    def first_position(self, sequence: int = 0) -> int:
        """Return the lowest cached position of a sequence, -1 if it is empty."""
        return self._memory.first_position(self._placed(sequence))

    def _placed(self, sequence: int) -> int:
        if not 0 <= sequence < self._n_own:
            there = f"0 to {self._n_own - 1} of this part of a context"
            raise OptionError(f"sequence {sequence} is outside {there}")
        return self._first + sequence


def share_text(source: Context, target: Context, end: int) -> bool:
    """Let sequence 0 of a conversation hold the first `end` positions of another's, and no others.

    Parts of one context share the cells; contexts of their own copy them. False between both kinds.
    """
    parts = isinstance(source, ContextPart), isinstance(target, ContextPart)
    if parts[0] != parts[1]:
        return False
    target.memory.clear()
    if isinstance(source, ContextPart):
        source.share(target, end)
    else:
        place_sequence(target, copy_sequence(source, 0), 0)
        target.memory.truncate(end)
    return True


class DraftContexts:
    """Contexts of a draft model: parts of one that all conversations share, or each its own."""

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        meeting: DraftMeeting | None,
        *,
        kind: type[SharedDraftContext] = SharedDraftContext,
        make: Callable[[Model, ContextOptions], Context] = Context,
        copies: bool = False,
    ) -> None:
        self._model, self._options, self._make = model, options, make
        self._kind, self._copies, self._meeting = kind, copies, meeting
        if meeting is not None and options.n_sequences * meeting.n_texts > MOST_SEQUENCES:
            self._meeting = None
        self._shared: SharedDraftContext | None = None

    def make(self) -> Context:
        """Return a context for a conversation; raises as opening one does."""
        meeting = self._meeting
        if meeting is not None:
            if self._shared is None:
                given = meeting, self._model, self._options, meeting.n_texts
                self._shared = self._kind(*given, self._make)
            part = self._shared.part(copies=self._copies)
            if part is not None:
                return part
        return self._make(self._model, self._options)

    def close(self) -> None:
        """Close the shared parts; again does nothing."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None


class _CopiedRows:
    """Copies of an evaluation's logits, which others' evaluations leave alone."""

    def __init__(self, rows: Rows, count: int) -> None:
        self._logits = [rows.logits(row).copy() for row in range(count)]
        self.logits = self._logits.__getitem__
