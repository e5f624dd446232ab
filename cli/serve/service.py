"""Answers of a server: requests become streams of the engine, read round by round.

What all APIs share: how many requests wait at most, seeds, the choices of a request side by side,
and what becomes of answers when nobody reads them any more or the server ends.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal
from weakref import WeakSet

from specrun.bindings.errors import ClosedError, OptionError, SpecrunError
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.grammars import bound_text
from specrun.cli.serve.prompts import PromptReader, Prompts
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.settings import ServeSettings
from specrun.cli.serve.tools.plan import PartReader
from specrun.runtime.chat import CallBegun, Part, too_long
from specrun.runtime.engine import Engine, EngineStream, RoundTrace
from specrun.runtime.laws import random_if_unset
from specrun.runtime.round import FinishReason, GenerationResult, TokenEvent

Finish = Literal["stop", "length", "tool_calls", "abort"]
"""Why a choice ended; "abort", as vLLM calls it, where the server cut it short."""
_FINISHES: dict[FinishReason, Finish] = {"stop": "stop", "length": "length", "cancelled": "abort"}


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice has said since its last delta: a round's text and tokens, or how it ended.

    `parts` are that text taken apart, `traces` those of its rounds, where they were asked for.
    `result` comes with the last delta of a choice, whose text is what was held back until then, and
    `finish` why it ended.
    """

    index: int
    text: str
    parts: Sequence[Part] = ()
    events: Sequence[TokenEvent] = ()
    traces: Sequence[RoundTrace] = ()
    result: GenerationResult | None = None
    finish: Finish | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Answer:
    """The choices of a request while they are made; `results` are those that have ended."""

    service: AnswerService
    request: AnswerRequest
    prompts: Prompts
    seed: int
    streams: Sequence[EngineStream]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    results: dict[int, GenerationResult] = field(default_factory=dict)

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield what the choices say, a round at a time; raises what ended a choice.

        Leaving it early frees the slots within a round.
        """
        try:
            async for delta in _merged([self._choice(k) for k in range(len(self.streams))]):
                if delta.result is not None:
                    self.results[delta.index] = delta.result
                    self.service.tell(delta.result)
                yield delta
        finally:
            self.cancel()

    async def _choice(self, index: int) -> AsyncIterator[Delta]:
        stream, length, called = self.streams[index], 0, False
        vocabulary = self.service.engine.vocabulary
        reader = PartReader(self.request.plan, vocabulary, self.prompts.end)
        async for events in stream.rounds():
            text = "".join([event.text for event in events])
            length += len(text)
            parts = reader.read(events)
            called = called or any(isinstance(part, CallBegun) for part in parts)
            if reader.done:
                stream.cancel()
            yield Delta(index, text, parts, events, stream.take_traces())
        try:
            result = await stream.wait()
        except SpecrunError as problem:
            if self.service.is_closing:
                raise ClosedError("the server ended before the answer had begun") from problem
            raise
        rest = result.text[length:]
        finish = _FINISHES[result.finish_reason]
        if reader.done or (called and finish == "stop"):
            finish = "tool_calls"
        yield Delta(index, rest, reader.finish(rest), result=result, finish=finish)

    def cancel(self) -> None:
        """Ask for no more tokens, and forget the answer."""
        for stream in self.streams:
            stream.cancel()
        self.service.forget(self)


class AnswerService:
    """Turns requests into answers of an engine, as many as its slots and the queue hold."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.prompts = PromptReader(engine, settings.template_kwargs)
        self.is_closing = False
        self.observers: list[Callable[[GenerationResult], None]] = []
        # Weak: one that nobody came to read counts no more, and its streams end with it.
        self._answers: WeakSet[Answer] = WeakSet()

    def tell(self, result: GenerationResult) -> None:
        """Tell all observers of a choice that has ended."""
        for observe in self.observers:
            observe(result)

    @property
    def n_choices(self) -> int:
        """How many choices are being made, or wait."""
        return sum(len(answer.streams) for answer in self._answers)

    async def begin(self, request: AnswerRequest) -> Answer:
        """Let the engine begin, or queue, what is asked; raises `RequestError` where it is full."""
        self._require_room(max(1, len(request.prompts)) * request.n)
        prompts = await self.prompts.read(request)
        longest = max(map(len, prompts.tokens))
        if longest > self.engine.n_ctx:  # at once, not when its turn comes
            raise too_long(longest, self.engine.n_ctx)
        seed = random_if_unset(request.params.seed)
        asked, vocabulary = request.params.grammar, self.engine.vocabulary
        grammar = await bound_text(
            asked, request.plan, vocabulary, prompts.end, lambda: self.is_closing
        )
        self._require_room(len(prompts.tokens) * request.n)  # others came meanwhile
        params = request.params.replace(seed=seed, grammar=grammar)
        speculative = request.speculative
        try:
            streams = [
                self.engine.submit(
                    prompt,
                    params,
                    max_tokens=request.max_tokens,
                    index=index,
                    logprobs=request.logprobs,
                    top_logprobs=request.top_logprobs,
                    drafter=speculative.drafter,
                    n_max=speculative.n_max,
                    accept=speculative.accept,
                    trace=speculative.trace,
                )
                for prompt in prompts.tokens
                for index in range(request.n)
            ]
        except OptionError as error:  # all else was looked at before
            raise RequestError(str(error), "speculative") from None
        answer = Answer(self, request, prompts, seed, streams)
        self._answers.add(answer)
        return answer

    def _require_room(self, n_more: int) -> None:
        if self.is_closing:
            raise ClosedError("the server is shutting down")
        most = self.engine.statistics().slots + self.settings.bounds.queue
        if self.n_choices + n_more > most:
            problem = f"{self.n_choices} answers are being made or wait, {most} are the most"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise RequestError(f"{problem}: try again soon", status=status, retry_after=2)

    def forget(self, answer: Answer) -> None:
        """Take an answer for ended."""
        self._answers.discard(answer)

    async def close(self) -> None:
        """Begin no more answers; end those that do not within the settings' seconds."""
        self.is_closing = True
        deadline = time.monotonic() + self.settings.drain_seconds
        while self._answers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.end_all()

    def end_all(self) -> None:
        """End all answers now: they say that they were cut short."""
        for answer in self._answers:
            for stream in answer.streams:
                stream.cancel()


async def _merged(sources: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[Delta]:
    """Yield what all sources yield, as it comes; raises the first error of one."""
    if len(sources) == 1:
        async for delta in sources[0]:
            yield delta
        return
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(len(sources))

    async def pump(source: AsyncIterator[Delta]) -> None:
        try:
            async for delta in source:
                await queue.put(delta)
        except Exception as problem:
            await queue.put(problem)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
