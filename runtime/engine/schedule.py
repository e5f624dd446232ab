"""Scheduling of answers: who reads a prompt, who is evaluated, who waits.

A turn is one evaluation of all draft trees. Before it, prompts are read: no more tokens than a
piece of one may have, so that is how much a long prompt delays a round of the other answers. They
are taken first come, first served; of those in slots a short one need not wait for a long one, of
which at least every second turn reads a piece. If the cache is full, the texts of idle slots go
first, least recently used first; then the newest answers wait, and leave their cells to the older
ones if need be: the oldest always goes on, so every answer ends.

A single slot has a context of its own: its rounds are evaluated at once, its cache needs no
schedule, and each turn is a step of its answer. Turns are made by an engine's thread or, with a
single slot, by the reader of the answer (`Schedule.stream`): nothing else lets answers go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TYPE_CHECKING

from specrun.bindings.errors import SpecrunError
from specrun.runtime.engine.answer import Answer, Making, Request
from specrun.runtime.engine.slots import SharedEvaluation, longest_prefix
from specrun.runtime.engine.streams import GenerationStream

if TYPE_CHECKING:
    from specrun.runtime.engine.session import Session


@dataclass(slots=True)
class Load:
    """The work of an engine: evaluations of trees, the texts in them, and the waits.

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

    def add(self, answer: Answer) -> None:
        """Add the rounds of an answer that were evaluated for it alone."""
        rounds, tokens = answer.statistics.evaluated
        self.evaluations += rounds
        self.texts += rounds
        self.tokens += tokens

    @property
    def texts_per_evaluation(self) -> float | None:
        """How many conversations an evaluation served."""
        return self.texts / self.evaluations if self.evaluations else None


@dataclass(slots=True, eq=False)
class Schedule:
    """The slots of an engine and the answers that wait for one; `turn` goes on with all of them.

    `shared` evaluates for several slots; None: there is one.
    While it does not admit any (`admits`), answers wait, and those under way go on to their ends.
    Not for several threads: the thread that owns the slots calls it.
    """

    sessions: Sequence[Session]
    shared: SharedEvaluation | None = None
    load: Load = field(default_factory=Load)
    admits: bool = True
    queue: deque[Answer] = field(default_factory=deque)
    _admitted: int = 0
    _passed_over: int = 0  # the number of the oldest reader, if another read before it

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.queue and all(session.is_idle for session in self.sessions)

    def load_now(self) -> Load:
        """Return the work so far, with that of answers under way."""
        load, running = replace(self.load), self.sessions[0].running
        if self.shared is None and running is not None:
            load.add(running)
        return load

    def stream(self, request: Request) -> GenerationStream:
        """Return a stream that its reader steps, in the only slot; nothing runs before.

        Raises `BusyError` while another answer is being streamed, and as
        `Session.require_answerable`.
        """
        (session,) = self.sessions
        session.require_idle()
        session.require_answerable(request)
        answer = Answer(request, session.vocabulary)
        return GenerationStream(answer, answer.attach(session), self.go_on)

    def go_on(self, answer: Answer, making: Making) -> None:
        """Let the answer of a stream go on by a step, in its reader's thread."""
        session = answer.session
        if session.making() is not making or session.running is not answer:
            if getgeneratorstate(making) == GEN_CLOSED:  # by `close()` or an interrupt
                answer.end(answer.result)
                return
            session.begin(answer, making)
        self._advance(session)

    def turn(self) -> None:
        """Let every answer go on by one round at most."""
        self.load.turns += 1
        self._end_unwanted()
        if self.shared is not None:
            self._turn_together(self.shared)
        elif self._busy():
            self._advance(self.sessions[0])
        else:
            self._admit()

    def _turn_together(self, shared: SharedEvaluation) -> None:
        """Draft, read prompts and evaluate, all answers together."""
        busy = self._busy()
        masking = [each for each in busy if each.stage == "masking" and not each.is_preempted]
        drafting = [each for each in busy if each.stage == "round" or each.drafts]
        shared.meeting.n_drafting = max(1, len(drafting))
        for session in [*masking, *drafting]:
            # After a round, an answer saves the rows that are still read of it, and drafts or ends.
            self._advance(session)
        self._draft_together(shared)
        self._admit()
        self._read_prompts()
        self._draft_together(shared)
        self._evaluate_together(shared)

    def close(self, why: BaseException) -> None:
        """End all answers, those that wait for a slot too."""
        for session in self._busy():
            self._end(session, why)
        while self.queue:
            self.queue.popleft().end(why)

    # -- answers -----------------------------------------------------------------------------------

    def _busy(self) -> list[Session]:
        """Return the sessions with an answer under way, the oldest answer first."""
        busy = [session for session in self.sessions if not session.is_idle]
        return sorted(busy, key=lambda session: session.number)

    def _end_unwanted(self) -> None:
        """End the answers that nobody reads any more."""
        for session in self._busy():
            if session.running is not None and session.running.is_unwanted:
                self._end(session)
        for answer in [each for each in self.queue if each.is_unwanted]:
            self.queue.remove(answer)
            answer.end(SpecrunError("the answer was cancelled before it had begun"))

    def _draft_together(self, shared: SharedEvaluation) -> None:
        """Evaluate for the drafters that wait, token by token of their drafts, until none waits."""
        while waiting := [each for each in self._busy() if each.drafts]:
            seconds = shared.meeting.evaluate()
            self.load.draft_evaluations += 1
            self.load.drafting_texts += len(waiting)
            for session in waiting:
                shared.clock.add(session.target, seconds / len(waiting))
                self._advance(session)

    def _evaluate_together(self, shared: SharedEvaluation) -> None:
        """Evaluate the trees of the answers that have room for them, and hand out their rounds."""
        counts = {each: each.n_waiting for each in self._fitting()}
        if not counts:
            return
        served = shared.evaluate([each.slot for each in counts if each.slot is not None])
        evaluated = [each for each in counts if each.slot in served]
        self.load.evaluations += 1
        self.load.texts += len(evaluated)
        self.load.tokens += sum(map(counts.__getitem__, evaluated))
        for session in evaluated:
            self._advance(session)

    def _admit(self) -> None:
        """Give waiting answers idle slots: each the one that holds most of its prompt."""
        while self.admits and self.queue and any(each.is_idle for each in self.sessions):
            answer = self.queue.popleft()
            session = self._session_for(answer.request)
            self._admitted += 1
            answer.number = self._admitted
            try:
                session.require_answerable(answer.request)
                self._begin(session, answer)
            except SpecrunError as problem:
                answer.end(problem)

    def _begin(self, session: Session, answer: Answer) -> None:
        """Turn a slot to a prompt, of which nothing is read yet."""
        answer.making = answer.attach(session)
        session.begin(answer, answer.making)
        self._advance(session)

    def _session_for(self, request: Request) -> Session:
        """Return the idle slot that holds most of a prompt; else the least recently used.

        Cells of another slot that holds more are shared with it, as far as its drafter can take
        over the states of the target that the other one's drafter has read.
        """
        prompt = request.prompt
        idle = [each for each in self.sessions if each.is_idle]
        reads = self.sessions[0].drafter_of(request).reads_target
        seen = [each for each in idle if not reads or each.drafter_of(request) is each.drafter]
        own, n_own = longest_prefix([(each.target, each.conversation) for each in seen], prompt)
        everyone = [(each.target, each.conversation) for each in self.sessions]
        other, n_other = longest_prefix(everyone, prompt)
        oldest = min(idle, key=lambda each: each.last_used)
        giver = oldest if other is None else self.sessions[other]
        if giver is not oldest and oldest.take_over(giver, request, n_other, n_own):
            self.load.shared_prompt_tokens += oldest.conversation.n_cached
            return oldest
        return oldest if own is None else seen[own]

    def _advance(self, session: Session) -> None:
        """Let an answer go on by a step; a round is handed out, an end or an error makes room."""
        answer, shared = session.running, self.shared
        assert answer is not None
        try:
            if shared is None:
                stage = session.step()
            else:
                with shared.clock.working_for(session.target):
                    stage = session.step()
        except StopIteration:
            self._end(session)
            return
        except SpecrunError as problem:
            self._end(session, problem)
            self._recover()
            return
        if stage == "round":
            if session.settles or answer.traced:
                answer.post()
        elif shared is None and stage == answer.stage == "reading":
            self.load.pieces += 1
        answer.stage = stage

    def _end(self, session: Session, problem: BaseException | None = None) -> None:
        """End a slot's answer; its cached tokens stay for the next prompt that begins so."""
        answer = session.running
        assert answer is not None
        if session.slot is not None:
            session.slot.withdraw()
        session.last_used = self.load.turns
        session.end()
        if self.shared is None:
            self.load.add(answer)
        answer.making = answer.reads_again = None
        answer.end(answer.result if problem is None else problem)

    # -- the cache ---------------------------------------------------------------------------------

    def _read_prompts(self) -> None:
        """Read prompts, if there is room: no more tokens than a piece of one may have.

        After the end of a prompt its first token comes before a part of another prompt.
        """
        left: int | None = None
        any_ended = False
        for session in self._readers():
            while session.reads:
                piece = min(session.n_unread, session.target.longest_piece)
                ends = piece == session.n_unread
                if left is not None and (piece > left or (any_ended and not ends)):
                    break
                # For the whole text: of one that does not fit, the tokens read would be lost again.
                if piece and not self._make_room(session.n_unread, session):
                    self.load.waited += 1
                    return
                left = (session.target.longest_piece if left is None else left) - piece
                any_ended = any_ended or ends
                self._read_piece(session, piece)

    def _readers(self) -> list[Session]:
        """Return those that read prompts, in the order in which they may.

        The prompt of which least is left goes first, but never twice before the oldest.
        """
        readers = [each for each in self._busy() if each.reads]
        if not readers or readers[0].number == self._passed_over:
            self._passed_over = 0
            return readers
        oldest = readers[0]
        readers.sort(key=lambda each: (each.n_unread, each.number))
        self._passed_over = 0 if readers[0] is oldest else oldest.number
        return readers

    def _read_piece(self, session: Session, piece: int) -> None:
        """Read the next tokens of a text; after the last of a prompt its answer drafts."""
        answer = session.running
        assert answer is not None
        if piece:
            self.load.pieces += 1
            if answer.reads_again is None:
                self._advance(session)
            else:
                next(answer.reads_again)
        if session.is_idle or session.n_unread:  # it failed, or there is more
            return
        if answer.reads_again is None:
            self._advance(session)
        answer.reads_again = None

    def _fitting(self) -> list[Session]:
        """Return those whose trees are evaluated now: the oldest first, while there are cells."""
        chosen: list[Session] = []
        needed = 0
        waiting = [each for each in self._busy() if each.n_waiting and not each.is_preempted]
        for session in waiting:
            if session.is_preempted:  # it made room for those before it
                continue
            more = session.n_waiting
            if not self._make_room(needed + more, session):
                self.load.waited += 1
                break
            needed += more
            chosen.append(session)
        return chosen

    def _make_room(self, n_cells: int, session: Session) -> bool:
        """Whether there are so many free cells, after dropping texts that may go for this one.

        First the caches of idle slots, least recently used first; then, for the oldest answer
        alone, those of the newest ones.
        """
        shared = self.shared
        if shared is None or shared.n_cells_free >= n_cells:
            return True
        for idle in sorted(self.sessions, key=lambda each: each.last_used):
            if idle.is_idle and idle.conversation.n_cached:
                idle.forget()
                self.load.evicted += 1
                if shared.n_cells_free >= n_cells:
                    return True
        busy = self._busy()
        if busy and busy[0] is session:
            for other in reversed(busy[1:]):
                self._preempt(other)
                if shared.n_cells_free >= n_cells:
                    return True
        return False

    def _recover(self) -> None:
        """Read again the texts whose cache an evaluation took with it that failed."""
        for session in self._busy():
            if session.slot is not None and session.slot.has_lost_cache:
                self._preempt(session)

    def _preempt(self, session: Session) -> None:
        """Take an answer's cells: it reads its text again when there is room."""
        answer, text, slot = session.running, session.conversation, session.slot
        if not text.n_cached or answer is None or slot is None:
            return
        self.load.preempted += 1
        if answer.stage == "reading":  # it has no token yet: it begins again
            session.end()
            session.forget()
            self._begin(session, answer)
            return
        slot.leave_cache()
        answer.reads_again = slot.prefill_pieces(text, len(text.tokens) - 1)
