"""Streams of an engine's answers: iterate over them in any thread, or with `async for`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specrun.runtime.engine.trace import RoundTrace
from specrun.runtime.round.results import GenerationResult, TokenEvent

if TYPE_CHECKING:  # whoever awaits has imported it
    import asyncio


class EngineStream(Iterator[TokenEvent], AsyncIterator[TokenEvent]):
    """An answer that an engine is making: its tokens as they come, then `result`.

    One reader, in whatever thread or event loop. `cancel()`, or dropping the stream, frees its slot
    within a round; the result then says "cancelled". Reading raises what ended the answer, such as
    `ContextFullError` or, where the engine was closed, `ClosedError`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._line = _Line()

    @property
    def listener(self) -> _Line:
        """What the engine tells."""
        return self._line

    def __iter__(self) -> EngineStream:
        return self

    def __next__(self) -> TokenEvent:
        event = self._line.next()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._line.ready():
            await self._line.news()
        event = self._line.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def rounds(self) -> AsyncIterator[list[TokenEvent]]:
        """Yield the tokens of each round at once; several rounds where the reader is slower.

        Ends with the answer, however it ended: `wait` says how.
        """
        line = self._line
        while line.ended is None or line.ready_tokens():
            if events := line.take_all():
                yield events
            else:
                await line.news()

    def take_traces(self) -> list[RoundTrace]:
        """Return what traces there are since the last call, if the answer was asked for with them.

        A round's is there when its first token can be read.
        """
        return self._line.take_traces()

    def cancel(self) -> None:
        """Ask for no more tokens; those that were made already can still be read."""
        self._line.cancelled = True

    close = cancel

    @property
    def done(self) -> bool:
        """Whether the answer has ended; tokens of it may be unread."""
        return self._line.ended is not None

    @property
    def result(self) -> GenerationResult:
        """The whole answer: waits for its end. Raises what ended it otherwise."""
        return self._line.wait()

    async def wait(self) -> GenerationResult:
        """Return the whole answer without blocking the event loop."""
        while not self.done:
            await self._line.news(for_the_end=True)
        return self._line.wait()

    def __del__(self) -> None:
        self._line.cancelled = True


class _Line:
    """What lies between the engine's thread and the reader: tokens, and how the answer ended.

    The engine holds it and not the stream, so that a stream nobody holds any more ends its answer.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.ended: GenerationResult | BaseException | None = None
        self._events: deque[TokenEvent] = deque()
        self._traces: list[RoundTrace] = []
        self._changed = threading.Condition()
        self._sleepers: list[Callable[[], None]] = []

    # -- the engine's side -------------------------------------------------------------------------

    def say(self, events: Sequence[TokenEvent], traces: Sequence[RoundTrace] = ()) -> None:
        """Take the tokens of a round, and the traces that were made of it."""
        with self._changed:
            self._traces.extend(traces)
            self._events.extend(events)
            self._wake()

    def end(self, result: GenerationResult | BaseException) -> None:
        """Take the whole answer, or why there is none."""
        with self._changed:
            self.ended = result
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        sleepers, self._sleepers = self._sleepers, []
        for wake in sleepers:
            wake()

    # -- the reader's side -------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether `next` would not have to wait."""
        return bool(self._events) or self.ended is not None

    def ready_tokens(self) -> bool:
        """Whether there are tokens to read."""
        return bool(self._events)

    def next(self) -> TokenEvent | None:
        """Wait for the next token and return it; None at the end. Raises what ended the answer."""
        with self._changed:
            self._changed.wait_for(self.ready)
            if self._events:
                return self._events.popleft()
            if isinstance(self.ended, BaseException):
                raise self.ended
            return None

    def take_all(self) -> list[TokenEvent]:
        """Return the tokens that lie ready, whole rounds of them."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
        return events

    def take_traces(self) -> list[RoundTrace]:
        """Return the traces that nobody has taken."""
        with self._changed:
            traces, self._traces = self._traces, []
        return traces

    def wait(self) -> GenerationResult:
        """Wait for the end and return the answer. Raises what ended it otherwise."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended is not None)
        if isinstance(self.ended, BaseException):
            raise self.ended
        assert self.ended is not None
        return self.ended

    async def news(self, *, for_the_end: bool = False) -> None:
        """Return when there is something to read or, if that is all that counts, at some news."""
        import asyncio

        loop = asyncio.get_running_loop()
        changed = loop.create_future()

        def wake() -> None:
            # In the engine's thread; the event loop may have ended meanwhile.
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, changed)

        with self._changed:
            if self.ended is not None or (self._events and not for_the_end):
                return
            self._sleepers.append(wake)
        await changed


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
