"""The engine: a target and drafters that answer several conversations at once, in a thread."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from specrun.bindings.errors import ClosedError
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.engine.answer import Request
from specrun.runtime.engine.core import EngineCore
from specrun.runtime.engine.opening import parse_options
from specrun.runtime.engine.request_options import answer_options
from specrun.runtime.engine.schedule import Load, Schedule
from specrun.runtime.engine.streams import EngineStream
from specrun.runtime.grammar.compiled import compiled
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.models.names import locate_model
from specrun.runtime.round.drafter import close_all
from specrun.runtime.round.results import GenerationResult

if TYPE_CHECKING:
    from concurrent.futures import Future

    from specrun.runtime.chat.template import Message

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The state of an engine, and its work so far (`load`); `cells` of `n_ctx` are used."""

    slots: int
    busy: int
    queued: int
    n_ctx: int
    cells: int
    load: Load


@dataclass(frozen=True, slots=True)
class SlotState:
    """The state of a slot: its drafter, and how many tokens of its text are cached."""

    busy: bool
    drafter: str
    n_tokens: int
    n_cached: int


class Engine(EngineCore):
    """Answers several conversations at once. Any thread, and any event loop, may `submit`.

    `n_ctx` tokens are shared by all slots: a conversation takes what it needs, at most the length
    that the model was trained for, and what idle ones still hold of their texts goes when others
    need it; 0 is that length for every slot, or as much of it as there is memory for
    (`memory_line`). Names of targets, expressions of drafters and further options are as for
    `Runtime`. Every slot drafts with a drafter of its own, all with the same weights. Close it, or
    use it as a context manager.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        drafter: str | None = "none",
        *,
        slots: int = 4,
        **options: Any,  # noqa: ANN401 - the fields of RuntimeOptions and its context
    ) -> None:
        parsed = parse_options(options)
        self._open(locate_model(target), drafter or "none", parsed, {}, slots)
        self._start()

    @classmethod
    def demo(cls, drafter: str = "draft", *, slots: int = 4, **options: Any) -> Engine:  # noqa: ANN401
        """Open the embedded family; paths may be left out of drafters, as in "draft(n=3)"."""
        engine = cls.__new__(cls)
        engine._open(demo_target(), drafter, parse_options(options), demo_drafters(), slots)
        engine._start()
        return engine

    def _start(self) -> None:
        for session in self._sessions:
            session.settles = True  # readers are other threads: no round of others waits for them
            session.clock = self._clock
        self._schedule = Schedule(self._sessions, self._shared, self._meeting, self._clock)
        self._changed = threading.Condition()
        self._requests: list[Request] = []
        # Work between answers, and where the thread that waits for it finds its result or error.
        self._tasks: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="specrun engine", daemon=True)
        self._thread.start()

    # -- answering ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Any,  # noqa: ANN401 - the fields of AnswerOptions
    ) -> EngineStream:
        """Ask for a continuation of `prompt`, a text or token ids; return its stream at once.

        Options are the fields of `AnswerOptions`: `max_tokens`, `index`, `logprobs`,
        `top_logprobs`, `drafter`, `n_max`, `accept` and `trace`. Raises `OptionError` for choices
        that the engine does not offer or that do not fit together; `GrammarError` for a grammar
        that cannot be compiled.

        For its seed each conversation gets the text that it gets alone, at temperature 0 and with
        drafters of point masses, but for the rounding of batches of another size.
        """
        wanted = answer_options(options)
        self._require_open()
        request = self._request(prompt, params, wanted)
        if request.params.grammar is not None:  # here, where nobody else waits for it; it is kept
            compiled(request.params.grammar, self.vocabulary)
        stream = EngineStream(request.seed)
        with self._changed:
            self._require_open()
            self._requests.append(dataclasses.replace(request, mailbox=stream.listener))
            self._changed.notify()
        return stream

    def _require_open(self) -> None:
        if self._closing:
            raise ClosedError("the engine is closed")

    def submit_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Any,  # noqa: ANN401 - the fields of AnswerOptions
    ) -> EngineStream:
        """Ask for an answer to {"role", "content"} messages; the rest as for `submit`."""
        return self.submit(self.chat_prompt(messages), params, **options)

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | None = None,
        **options: Any,  # noqa: ANN401 - the fields of AnswerOptions
    ) -> list[GenerationResult]:
        """Return the continuations of all prompts, in their order; the rest as for `submit`."""
        return list(_results([self.submit(prompt, params, **options) for prompt in prompts]))

    def each_of_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_tokens: Sequence[int | None],
        indices: Sequence[int],
        **options: Any,  # noqa: ANN401 - the other fields of AnswerOptions
    ) -> Iterator[GenerationResult]:
        """Yield the continuations of all prompts in turn; each has its own limit and index.

        If one fails, or nobody takes the rest, those that are not done are cancelled.
        """
        asked = zip(prompts, max_tokens, indices, strict=True)
        yield from _results(
            [
                self.submit(prompt, params, max_tokens=most, index=index, **options)
                for prompt, most, index in asked
            ]
        )

    def require_idle(self) -> None:
        """Do nothing: work between answers waits until none is being made."""

    def _when_idle(self, work: Callable[[], _Result]) -> _Result:
        """Do something when no answer is being made; requests that come meanwhile wait."""
        from concurrent.futures import Future

        ended: Future[_Result] = Future()
        with self._changed:
            self._require_open()
            self._tasks.append((work, ended))
            self._changed.notify()
        return ended.result()

    # -- its state ---------------------------------------------------------------------------------

    @property
    def drafter(self) -> str:
        """The expression of the drafter of requests that choose none."""
        return self._choices.own_drafter

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closing

    def statistics(self) -> EngineStatistics:
        """Return the present state; numbers may be of neighbouring moments."""
        schedule, shared = self._schedule, self._shared
        alone = self._sessions[0].conversation
        cells = alone.n_cached if shared is None else shared.n_cells_used
        return EngineStatistics(
            slots=len(schedule.sessions),
            busy=sum(not session.is_idle for session in schedule.sessions),
            queued=len(schedule.queue) + len(self._requests),
            n_ctx=self.n_ctx,
            cells=cells,
            load=dataclasses.replace(schedule.load),
        )

    def slots(self) -> tuple[SlotState, ...]:
        """Return the state of each slot; numbers may be of neighbouring moments."""
        return tuple(
            SlotState(
                not session.is_idle,
                session.drafter.name,
                len(session.conversation.tokens),
                session.conversation.n_cached,
            )
            for session in self._schedule.sessions
        )

    def close(self) -> None:
        """End all answers with `ClosedError` and free the native memory; again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Step until the engine is closed."""
        why: BaseException = ClosedError("the engine was closed while an answer was being made")
        try:
            while self._take_requests():
                self._step()
        except BaseException as problem:  # a defect: no reader may wait for ever
            why = problem
            raise
        finally:
            with self._changed:
                self._closing = True
                self._schedule.queue.extend(self._requests)
                self._requests = []
            for _, ended in self._tasks:
                ended.set_exception(ClosedError("the engine was closed before that was done"))
            self._schedule.close(why)
            close_all(self._owned)

    def _step(self) -> None:
        """Let every answer go on by a round at most; do the work that waits for idle slots.

        While there is such work, no more requests are admitted.
        """
        schedule = self._schedule
        schedule.admits = not self._tasks
        if self._tasks and all(session.is_idle for session in schedule.sessions):
            while self._tasks:
                work, ended = self._tasks.pop(0)
                try:
                    ended.set_result(work())
                except BaseException as problem:  # raised where its end is waited for
                    ended.set_exception(problem)
            schedule.admits = True
        schedule.turn()

    def _take_requests(self) -> bool:
        """Wait until there is something to do; return False if the engine is to be closed."""
        schedule = self._schedule
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._requests or self._tasks or not schedule.is_idle
            )
            taken, self._requests = self._requests, []
            schedule.queue.extend(taken)
            return not self._closing


def _results(streams: Sequence[EngineStream]) -> Iterator[GenerationResult]:
    """Yield the results in turn; cancel those that are not done if that ends early."""
    try:
        for stream in streams:
            yield stream.result
    finally:
        for stream in streams:
            stream.cancel()
