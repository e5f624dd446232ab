"""Streams of an engine's answers: iterate over them in any thread, or with `async for`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specrun.runtime.engine.trace import RoundTrace
from specrun.runtime.round.results import GenerationResult, TokenEvent

if TYPE_CHECKING:  # code that awaits has imported it
    import asyncio


class EngineStream(Iterator[TokenEvent], AsyncIterator[TokenEvent]):
    """An answer that an engine is making: its tokens as they come, then `result`.

    One reader, in any thread or event loop. `cancel()`, or dropping the stream, frees its slot
    within a round; the result then says "cancelled". Reading raises the error that ended the
    answer, such as `ContextFullError` or, if the engine was closed, `ClosedError`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._mailbox = Mailbox()

    @property
    def listener(self) -> Mailbox:
        """The mailbox that the engine puts tokens into."""
        return self._mailbox

    def __iter__(self) -> EngineStream:
        return self

    def __next__(self) -> TokenEvent:
        event = self._mailbox.next()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._mailbox.ready():
            await self._mailbox.news()
        event = self._mailbox.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def rounds(self) -> AsyncIterator[list[TokenEvent]]:
        """Yield the tokens of each round at once; of several rounds if the reader is slower.

        Ends with the answer, however it ended: `wait` returns or raises that.
        """
        mailbox = self._mailbox
        while mailbox.ended is None or mailbox.ready_tokens():
            if events := mailbox.take_all():
                yield events
            else:
                await mailbox.news()

    def take_traces(self) -> list[RoundTrace]:
        """Return the traces of rounds since the last call, if the answer has traces.

        A round's is there when its first token can be read.
        """
        return self._mailbox.take_traces()

    def cancel(self) -> None:
        """Ask for no more tokens; those that were made already can still be read."""
        self._mailbox.cancelled = True

    close = cancel

    @property
    def done(self) -> bool:
        """Whether the answer has ended; tokens of it may be unread."""
        return self._mailbox.ended is not None

    @property
    def result(self) -> GenerationResult:
        """The whole answer: waits for its end. Raises the error that ended it."""
        return self._mailbox.wait()

    async def wait(self) -> GenerationResult:
        """Return the whole answer without blocking the event loop."""
        while not self.done:
            await self._mailbox.news(for_the_end=True)
        return self._mailbox.wait()

    def __del__(self) -> None:
        self._mailbox.cancelled = True


class Mailbox:
    """Tokens on their way from the engine's thread to the reader, and the answer's end.

    The engine holds it and not the stream, so that a stream that was dropped ends its answer.
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
        """Take the whole answer, or the error that ended it; nothing comes after it."""
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
        """Wait for the next token and return it; None at the end. Raises an error that ended it."""
        with self._changed:
            self._changed.wait_for(self.ready)
            if self._events:
                return self._events.popleft()
            if isinstance(self.ended, BaseException):
                raise self.ended
            return None

    def take_all(self) -> list[TokenEvent]:
        """Return the tokens that are there, of whole rounds."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
        return events

    def take_traces(self) -> list[RoundTrace]:
        """Return the traces since the last call."""
        with self._changed:
            traces, self._traces = self._traces, []
        return traces

    def wait(self) -> GenerationResult:
        """Wait for the end and return the answer. Raises the error that ended it."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended is not None)
        if isinstance(self.ended, BaseException):
            raise self.ended
        assert self.ended is not None
        return self.ended

    async def news(self, *, for_the_end: bool = False) -> None:
        """Return when there is something to read; `for_the_end`: at any change."""
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
