"""Scheduling of an engine's answers: who reads a prompt, who is evaluated, who waits.

A turn is one evaluation of all draft trees. Before it, prompts are read: no more tokens than a
piece of one may have, so that is how much a long prompt delays a round of the other answers. They
are taken first come, first served; of those in slots a short one need not wait for a long one, of
which at least every second turn reads a piece. Where the cache is full, what idle slots still hold
goes first, least recently used first; then the newest answers wait, and leave their cells to the
older ones if need be: the oldest always goes on, so every answer ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specrun.bindings.errors import SpecrunError
from specrun.runtime.drafters.batching import DraftMeeting
from specrun.runtime.engine.request_options import Choice, DrafterKey, SlotDrafters
from specrun.runtime.engine.session import GenerationStream, Session
from specrun.runtime.engine.slots import SharedEvaluation, SlotTarget, longest_prefix
from specrun.runtime.engine.trace import Clocks, RoundTrace, Tracer
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.round.results import GenerationResult, TokenEvent


class Listener(Protocol):
    """Who asked: hears tokens, round by round, then once how it ended."""

    def say(self, events: Sequence[TokenEvent]) -> None:
        """Take the tokens of a round."""

    def end(self, result: GenerationResult | BaseException) -> None:
        """Take the whole answer, or why there is none; nothing comes after it."""

    def trace(self, trace: RoundTrace) -> None:
        """Take the trace of a round, before its tokens."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What is to be answered, for whom."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    index: int
    max_tokens: int | None
    logprobs: bool
    listener: Listener
    choice: Choice
    top_logprobs: int = 0
    trace: bool = False


@dataclass(slots=True, eq=False)
class Seat:
    """A slot: its session, the answer under way if there is one, and when it was last used."""

    session: Session
    target: SlotTarget
    drafters: SlotDrafters
    last_used: int = 0
    request: Request | None = None
    stream: GenerationStream | None = None
    number: int = 0  # in order of admission: the oldest has the least
    tracer: Tracer | None = None
    reads: bool = False
    masks: bool = False  # it waits for what its grammar says
    reads_again: Iterator[None] | None = None  # what it left to older answers

    @property
    def is_idle(self) -> bool:
        """Whether it may take the next request."""
        return self.request is None

    def drafts(self, choice: DrafterKey) -> bool:
        """Whether this drafter drafted its last answer, and saw what is cached of it."""
        return self.session.drafter is self.drafters.started.get(choice)

    @property
    def n_unread(self) -> int:
        """How many tokens are to be evaluated before its text's last one."""
        return len(self.target.text.tokens) - 1 - self.target.text.n_cached


@dataclass(slots=True)
class Load:
    """What an engine has done: evaluations of trees, the texts in them, and what had to wait.

    `tokens` are those of the trees, roots included. `draft_evaluations` served the drafts of
    `drafting_texts` texts at once, counted over all.
    """

    turns: int = 0
    evaluations: int = 0
    texts: int = 0
    tokens: int = 0
    pieces: int = 0
    shared_prompt_tokens: int = 0
    evicted: int = 0
    waited: int = 0
    preempted: int = 0
    draft_evaluations: int = 0
    drafting_texts: int = 0

    @property
    def texts_per_evaluation(self) -> float | None:
        """How many conversations an evaluation served."""
        return self.texts / self.evaluations if self.evaluations else None

    @property
    def tokens_per_text(self) -> float | None:
        """How many tokens a conversation had evaluated at once: its drafts, and one."""
        return self.tokens / self.texts if self.texts else None


@dataclass(slots=True, eq=False)
class Schedule:
    """The slots of an engine and the requests that wait for one; `turn` goes on with all of them.

    While it does not admit any (`admits`), requests wait, and what was begun goes on to its end.
    Not for several threads: whoever owns the slots calls it.
    """

    shared: SharedEvaluation
    seats: list[Seat]
    meeting: DraftMeeting
    load: Load = field(default_factory=Load)
    admits: bool = True
    _queue: deque[Request] = field(default_factory=deque)
    _admitted: int = 0
    _passed_over: int = 0  # the number of the oldest reader, where another read before it

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._queue.append(request)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._queue and all(seat.is_idle for seat in self.seats)

    @property
    def n_queued(self) -> int:
        """How many requests wait for a slot."""
        return len(self._queue)

    def turn(self) -> None:
        """Let every answer go on by one round at most."""
        self.load.turns += 1
        self._end_cancelled()
        masking = [seat for seat in self._busy() if seat.masks and not seat.reads_again]
        drafting = self._drafting()
        self.meeting.n_drafting = max(1, len(drafting))
        for seat in [*masking, *drafting]:
            # Those that handed out a round save what is still read of it, and draft again or end.
            self._advance(seat)
        self._draft_together()
        self._admit()
        self._read_prompts()
        self._draft_together()
        evaluated = self._fitting()
        if evaluated:
            n_tokens = sum(seat.target.n_waiting for seat in evaluated)
            self.shared.evaluate([seat.target for seat in evaluated])
            self.load.evaluations += 1
            self.load.texts += len(evaluated)
            self.load.tokens += n_tokens
        for seat in evaluated:
            self._advance(seat)
            self._hand_out(seat)

    def close(self, why: BaseException) -> None:
        """End all answers, those that wait for a slot too."""
        for seat in self._busy():
            self._end(seat, why)
        while self._queue:
            self._queue.popleft().listener.end(why)

    # -- answers -----------------------------------------------------------------------------------

    def _busy(self) -> list[Seat]:
        return sorted((seat for seat in self.seats if not seat.is_idle), key=_by_age)

    def _drafting(self) -> list[Seat]:
        """Return those that neither read a prompt nor wait: for an evaluation, or a grammar."""
        return [
            seat for seat in self._busy() if not (seat.reads or seat.masks or seat.target.n_waiting)
        ]

    def _draft_together(self) -> None:
        """Evaluate what drafters wait for, token by token of their drafts, until none waits."""
        while waiting := self._drafting():
            seconds = self.meeting.evaluate()
            self.load.draft_evaluations += 1
            self.load.drafting_texts += len(waiting)
            for seat in waiting:
                self.shared.clock.add(seat.target, seconds / len(waiting))
                self._advance(seat)

    def _end_cancelled(self) -> None:
        for seat in self._busy():
            if seat.request is not None and seat.request.listener.cancelled:
                self._end(seat)
        for request in [each for each in self._queue if each.listener.cancelled]:
            self._queue.remove(request)
            request.listener.end(_Cancelled())

    def _admit(self) -> None:
        """Give requests to idle slots: each to the one that holds most of its prompt."""
        while self.admits and self._queue and any(seat.is_idle for seat in self.seats):
            request = self._queue.popleft()
            seat = self._seat_for(request)
            self._admitted += 1
            seat.request, seat.number = request, self._admitted
            try:
                self._begin(seat, request)
            except SpecrunError as problem:
                self._end(seat, problem)

    def _begin(self, seat: Seat, request: Request) -> None:
        """Turn a slot to a request's prompt, of which nothing is read yet."""
        seat.session.rule = request.choice.rule
        seat.session.draft_with(seat.drafters.get(request.choice.drafter))
        vocabulary, greedy = seat.session.vocabulary, request.params.is_greedy
        seat.tracer = Tracer(vocabulary, greedy=greedy) if request.trace else None
        seat.stream = seat.session.stream(
            request.prompt,
            request.params,
            seed=request.seed,
            index=request.index,
            max_tokens=request.max_tokens,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            n_max=request.choice.n_max,
            witness=None if seat.tracer is None else seat.tracer.witness,
        )
        self._advance(seat)

    def _seat_for(self, request: Request) -> Seat:
        """Return the idle slot that holds most of a prompt; else the least recently used.

        What another slot holds more of is shared with it. A drafter that reads the target has to
        see a prompt: it goes on only from what it saw.
        """
        prompt, choice = request.prompt, request.choice.drafter
        idle = [seat for seat in self.seats if seat.is_idle]
        reads = self.seats[0].drafters.get(choice).reads_target
        seen = [
            seat for seat in idle if not reads or seat.drafters.get(choice) is seat.session.drafter
        ]
        own, n_own = longest_prefix([seat.target for seat in seen], prompt)
        other, n_other = longest_prefix([seat.target for seat in self.seats], prompt)
        kept = next((seat for seat in idle if seat.target is own), None)
        seat = kept if kept is not None else min(idle, key=lambda each: each.last_used)
        if other is not None and n_other > n_own and not reads:
            seat = min(idle, key=lambda each: each.last_used)
            if seat.target is not other:
                seat.target.take_over(other, n_other)
                self.load.shared_prompt_tokens += n_other
        return seat

    def _advance(self, seat: Seat) -> None:
        """Let an answer go on by a step; one that ends, or fails, makes room."""
        assert seat.stream is not None
        try:
            with self.shared.clock.working_for(seat.target):
                stage = seat.stream.advance()
        except SpecrunError as problem:
            self._end(seat, problem)
            return
        if stage is None:
            self._end(seat)
            return
        seat.reads, seat.masks = stage == "reading", stage == "masking"

    def _hand_out(self, seat: Seat) -> None:
        request, stream = seat.request, seat.stream
        if request is None or stream is None:
            return
        if seat.tracer is not None:
            self._tell_trace(seat, seat.tracer, stream, request.listener)
        events = list(iter(stream.next_of_round, None))
        if events:
            request.listener.say(events)

    def _tell_trace(
        self, seat: Seat, tracer: Tracer, stream: GenerationStream, listener: Listener
    ) -> None:
        n_tokens = len(seat.target.text.tokens)
        trace = tracer.trace(
            n_tokens, stream.result.stats, self.shared.last_cost, lambda: self._clocks(seat)
        )
        if trace is not None:
            listener.trace(trace)

    def _clocks(self, seat: Seat) -> Clocks:
        """Return the seconds that a slot has taken so far."""
        return Clocks(*seat.session.native_seconds(), self.shared.clock.spent(seat.target))

    def _end(self, seat: Seat, problem: BaseException | None = None) -> None:
        """End a slot's answer; what it has cached stays for the next prompt that begins so."""
        request, stream = seat.request, seat.stream
        assert request is not None
        seat.request = seat.stream = seat.tracer = seat.reads_again = None
        seat.reads = seat.masks = False
        seat.target.withdraw()
        seat.last_used = self.load.turns
        if stream is not None:
            stream.close()
        if problem is None and stream is None:
            problem = _Cancelled()
        ended = problem if stream is None or problem is not None else stream.result
        assert ended is not None
        request.listener.end(ended)

    # -- the cache ---------------------------------------------------------------------------------

    def _read_prompts(self) -> None:
        """Read prompts, if there is room: no more tokens than a piece of one may have.

        Where a prompt was read to its end its first token comes before a part of another is read.
        """
        left: int | None = None
        any_ended = False
        for seat in self._readers():
            while seat.reads or seat.reads_again:
                piece = min(seat.n_unread, seat.target.longest_piece)
                ends = piece == seat.n_unread
                if left is not None and (piece > left or (any_ended and not ends)):
                    break
                if piece and not self._make_room(piece, seat):
                    self.load.waited += 1
                    return
                left = (seat.target.longest_piece if left is None else left) - piece
                any_ended = any_ended or ends
                self._read_piece(seat, piece)

    def _readers(self) -> list[Seat]:
        """Return those that read prompts, in the order in which they may.

        What has least left goes first, but never twice before the oldest.
        """
        readers = [seat for seat in self._busy() if seat.reads or seat.reads_again]
        if not readers or readers[0].number == self._passed_over:
            self._passed_over = 0
            return readers
        oldest = readers[0]
        readers.sort(key=lambda seat: (seat.n_unread, seat.number))
        self._passed_over = 0 if readers[0] is oldest else oldest.number
        return readers

    def _read_piece(self, seat: Seat, piece: int) -> None:
        """Read the next tokens of a text; after the last of a prompt its answer drafts."""
        if piece:
            self.load.pieces += 1
            if seat.reads_again is None:
                self._advance(seat)
            else:
                next(seat.reads_again)
        if seat.is_idle or seat.n_unread:  # it failed, or there is more
            return
        if seat.reads_again is None:
            if seat.tracer is not None:
                seat.tracer.begin(len(seat.target.text.tokens), self._clocks(seat))
            self._advance(seat)
        seat.reads_again = None

    def _fitting(self) -> list[Seat]:
        """Return those whose trees are evaluated now: the oldest first, while there are cells."""
        chosen: list[Seat] = []
        needed = 0
        waiting = [seat for seat in self._busy() if seat.target.n_waiting and not seat.reads_again]
        for seat in waiting:
            if seat.reads_again is not None:  # it made room for those before it
                continue
            more = seat.target.n_waiting
            if not self._make_room(needed + more, seat):
                self.load.waited += 1
                break
            needed += more
            chosen.append(seat)
        return chosen

    def _make_room(self, n_cells: int, seat: Seat) -> bool:
        """Whether there are so many free cells, after dropping what may be dropped for this seat.

        First the caches of idle slots, least recently used first; then, for the oldest answer
        alone, those of the newest ones.
        """
        if self.shared.n_cells_free >= n_cells:
            return True
        for idle in sorted(self.seats, key=lambda each: each.last_used):
            if idle.is_idle and idle.target.text.n_cached:
                idle.session.forget()
                self.load.evicted += 1
                if self.shared.n_cells_free >= n_cells:
                    return True
        busy = self._busy()
        if busy and busy[0] is seat:
            for other in reversed(busy[1:]):
                self._preempt(other)
                if self.shared.n_cells_free >= n_cells:
                    return True
        return False

    def _preempt(self, seat: Seat) -> None:
        """Take an answer's cells: it reads its text again when there is room."""
        if not seat.target.text.n_cached:
            return
        self.load.preempted += 1
        if seat.reads:  # it has said nothing yet: it begins again
            request, stream = seat.request, seat.stream
            assert request is not None
            assert stream is not None
            stream.close()
            seat.session.forget()
            self._begin(seat, request)
            return
        target = seat.target
        target.leave_cache()
        seat.reads_again = target.prefill_pieces(target.text, len(target.text.tokens) - 1)


class _Cancelled(SpecrunError):
    """The answer was cancelled before it had begun."""

    def __init__(self) -> None:
        super().__init__("the answer was cancelled before it had begun")


def _by_age(seat: Seat) -> int:
    return seat.number
