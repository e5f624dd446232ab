"""Streams of answers: iterate over them in any thread, or with `async for`."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specrun.runtime.chat.reader import Content, Reasoning
from specrun.runtime.round.results import ChatResult, GenerationResult, TokenEvent

if TYPE_CHECKING:  # code that awaits has imported it
    import asyncio

    from specrun.runtime.chat import ReplyReading
    from specrun.runtime.engine.answer import Answer, Making
    from specrun.runtime.engine.trace import RoundTrace


_Read = Callable[[TokenEvent], TokenEvent]


class GenerationStream(Iterator[TokenEvent], AsyncIterator[TokenEvent]):
    """An answer in the making: iterate over its tokens; afterwards `result` holds the whole.

    An engine makes its answers in its own thread; then any thread or event loop may be the one
    reader. A runtime's answer goes on while it is read, by the reader's calls (`go_on`). Closing
    or dropping the stream early (or Ctrl-C while it runs) ends the answer, an engine's within a
    round; `result` is then "cancelled", and the slot is free. Reading raises the error that
    ended the answer, such as `ContextFullError` or `ClosedError`. The result of a chat is a
    `ChatResult`.
    """

    def __init__(
        self,
        answer: Answer,
        making: Making | None = None,
        go_on: Callable[[Answer, Making], None] | None = None,
    ) -> None:
        self.seed = answer.request.seed
        self._answer = answer
        # The generator refers to the answer, not to this stream: no cycle, so dropping the stream
        # ends it.
        self._making, self._go_on = making, go_on
        self._take = answer.take if go_on is None else answer.take_here
        self._reading = answer.request.options.reading
        self._read: _Read | None = None
        if self._reading is not None:
            self._read = _EventReader(self._reading).read
            self._take = functools.partial(_taken, self._take, self._read)
        answer.reader = weakref.ref(self)

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> TokenEvent:
        answer, making, go_on = self._answer, self._making, self._go_on
        while True:
            ended = answer.ended  # read before: the events until the end are there then
            if (event := self._take()) is not None:
                return event
            if ended is not None:
                answer.wait()
                raise StopIteration
            if making is None or go_on is None:
                answer.wait_for_news()
            else:
                go_on(answer, making)

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while True:
            done = self.done
            if (event := self._take()) is not None:
                return event
            if done:
                self._answer.wait()
                raise StopAsyncIteration
            await self._news()

    async def rounds(self) -> AsyncIterator[list[TokenEvent]]:
        """Yield the tokens of each round at once; of several rounds if the reader is slower.

        Ends with the answer, however it ended: `wait` returns or raises that.
        """
        while True:
            done = self.done
            if events := [*iter(self._take, None)]:
                yield events
            elif done:
                return
            else:
                await self._news()

    def take_traces(self) -> list[RoundTrace]:
        """Return the traces of rounds since the last call, if the answer has traces.

        A round's is there when its first token can be read.
        """
        return self._answer.take_traces()

    def close(self) -> None:
        """Stop the answer; an engine's tokens that were made already can still be read."""
        if self._making is None:
            self._answer.cancelled = True
        else:
            self._making.close()

    cancel = close

    @property
    def done(self) -> bool:
        """Whether the answer has ended; tokens of an engine's may be unread."""
        return self._answer.ended is not None

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt were cached; 0 before the answer has begun."""
        return self._answer.n_cached

    @property
    def result(self) -> GenerationResult:
        """The answer: a runtime's so far, whole at its end; an engine's is waited for.

        Raises the error that ended an engine's.
        """
        if self._making is None:
            return self._told(self._answer.wait())
        return self._told(self._answer.result)

    async def wait(self) -> GenerationResult:
        """Return the whole answer without blocking the event loop for more than a step."""
        while not self.done:
            await self._news(for_the_end=True)
        return self._told(self._answer.wait())

    # -- to the end --------------------------------------------------------------------------------

    def drain(self) -> GenerationResult:
        """Return the whole answer, made or waited for."""
        return self._run(self._answer.take_round)

    def hand_to(self, consume: Callable[[TokenEvent], None]) -> GenerationResult:
        """Run to the end, give each token to `consume` as it comes, and return the result.

        If a device computes (a GPU), tokens of a runtime's round are handed out while it evaluates
        the next one, so that the time of `consume`, such as printing, is no part of a round.
        Answers with stop strings or log-probabilities are handed out before: those decide the next
        step, or read rows that the next evaluation overwrites. An error of `consume` ends the
        answer.
        """
        answer, read = self._answer, self._read
        next_event = answer.next_event
        if self._go_on is None:
            try:
                for event in self:
                    consume(event)
            finally:
                self.close()
            return self.result

        def hand_out() -> None:
            statistics, waits = answer.statistics, answer.hand_out is not None
            while (event := next_event()) is not None:
                consume(event if read is None else read(event))
                del event  # one that somebody holds costs the stream a copy of its logits
                if waits:  # in time that counts: a device computed meanwhile
                    statistics.left = None
                else:
                    statistics.come_back()
                if answer.spoken is None:
                    break

        return self._run(hand_out)

    def _run(self, hand_out: Callable[[], None]) -> GenerationResult:
        """Go on to the end, and have every round handed out."""
        answer, making, go_on = self._answer, self._making, self._go_on
        if making is None or go_on is None:
            return self._told(answer.wait())
        context = answer.session.target.context
        waits = answer.may_wait
        try:
            answer.statistics.come_back()
            if waits:
                answer.hand_out = context.while_computing = hand_out
            while answer.ended is None:
                if not waits or answer.is_at_end:
                    hand_out()
                go_on(answer, making)
            return self._told(answer.wait())
        except BaseException:
            making.close()  # or the error's traceback would keep the answer, and the session busy
            raise
        finally:
            context.while_computing = None

    def _told(self, result: GenerationResult) -> GenerationResult:
        """Return a result, that of a chat with its text by reasoning, answer and calls."""
        if self._reading is None:
            return result
        is_cut = result.finish_reason != "stop"
        reply = self._reading.whole(result.token_ids, result.text, is_cut=is_cut)
        fields = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
        calls = reply.named_calls((result.seed, result.token_ids))
        own = {"text": reply.content, "reasoning": reply.reasoning, "tool_calls": calls}
        return ChatResult(**{**fields, **own, "raw_text": result.text})

    async def _news(self, *, for_the_end: bool = False) -> None:
        """Let the answer go on by a step, or wait until it did."""
        answer, making, go_on = self._answer, self._making, self._go_on
        if making is None or go_on is None:
            await answer.news(for_the_end=for_the_end)
            return
        import asyncio

        if for_the_end:
            answer.take_round()
        go_on(answer, making)
        await asyncio.sleep(0)


def _taken(take: Callable[[], TokenEvent | None], read: _Read) -> TokenEvent | None:
    """Return the next token that is there, by its parts."""
    event = take()
    return None if event is None else read(event)


class _EventReader:
    """Tells events by the parts of a reply: each has those that became certain with its token."""

    def __init__(self, reading: ReplyReading) -> None:
        self._reader = reading.reader()

    def read(self, event: TokenEvent) -> TokenEvent:
        """Return the event with its parts."""
        parts = self._reader.read([(event.token_id, event.text)])
        if event.finish_reason is not None:
            parts = [*parts, *self._reader.finish("", is_cut=event.finish_reason != "stop")]
        content = (part.text for part in parts if isinstance(part, Content))
        thoughts = (part.text for part in parts if isinstance(part, Reasoning))
        event.tell(parts, "".join(content), "".join(thoughts))
        return event


EngineStream = GenerationStream
"""The streams of engines are the same."""


class Mailbox:
    """Tokens on their way from an engine's thread to the reader, and the answer's end.

    The engine refers to it and not to the stream, so that a stream that was dropped ends its
    answer: `reader` is a weak reference to it.
    """

    def __init__(self) -> None:
        self.reader: Callable[[], GenerationStream | None] = lambda: None
        self.cancelled = False
        self.n_cached = 0  # tokens of the prompt that its slot held when it began
        self.ended: GenerationResult | BaseException | None = None
        self._events: deque[TokenEvent] = deque()
        self._traces: list[RoundTrace] = []
        self._changed = threading.Condition()
        self._sleepers: list[Callable[[], None]] = []

    # -- the engine's side -------------------------------------------------------------------------

    @property
    def is_unwanted(self) -> bool:
        """Whether the reader has cancelled the answer or dropped its stream."""
        return self.cancelled or self.reader() is None

    def put(self, events: Sequence[TokenEvent], traces: Sequence[RoundTrace] = ()) -> None:
        """Take the tokens of a round, and the traces that were made of it."""
        with self._changed:
            self._traces.extend(traces)
            self._events.extend(events)
            sleepers = self._woken()
        for wake in sleepers:
            wake()

    def end(self, result: GenerationResult | BaseException) -> None:
        """Take the whole answer, or the error that ended it; nothing comes after it."""
        with self._changed:
            self.ended = result
            sleepers = self._woken()
        for wake in sleepers:
            wake()

    def _woken(self) -> list[Callable[[], None]]:
        """Wake the threads that wait; return the event loops to wake, without the lock.

        A loop that is woken runs at once, and would wait for the lock.
        """
        self._changed.notify_all()
        sleepers, self._sleepers = self._sleepers, []
        return sleepers

    # -- the reader's side -------------------------------------------------------------------------

    @property
    def has_tokens(self) -> bool:
        """Whether there are tokens to read."""
        return bool(self._events)

    def take(self) -> TokenEvent | None:
        """Return the next token that is there; None if there is none now."""
        return self._events.popleft() if self._events else None

    def take_traces(self) -> list[RoundTrace]:
        """Return the traces since the last call."""
        if not self._traces:
            return []
        with self._changed:
            traces, self._traces = self._traces, []
        return traces

    def wait_for_news(self) -> None:
        """Wait until there is a token to read, or the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self.ended is not None)

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
