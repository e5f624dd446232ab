"""Lanes: threads beside the event loop, a bounded number for each kind of work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

_Result = TypeVar("_Result")


class Lane:
    """Threads beside the event loop for one kind of work: `width` at once, more of it waits.

    Waiting work is dropped with its client. Work that has begun goes on and keeps its place, but it
    does not keep the process from ending.
    """

    def __init__(self, width: int, name: str) -> None:
        self._width, self._name = width, name
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` in another thread; return its result, or raise its error."""
        loop = asyncio.get_running_loop()
        free = self._free.setdefault(loop, asyncio.Semaphore(self._width))
        done: asyncio.Future[_Result] = loop.create_future()

        def finish(result: _Result | None, problem: BaseException | None) -> None:
            free.release()
            if done.cancelled():
                return
            if problem is None:
                done.set_result(cast("_Result", result))
            else:
                done.set_exception(problem)

        def attempt() -> None:
            result: _Result | None = None
            problem: BaseException | None = None
            try:
                result = work()
            except BaseException as raised:
                problem = raised
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(finish, result, problem)

        await free.acquire()
        try:
            threading.Thread(target=attempt, name=self._name, daemon=True).start()
        except BaseException:
            free.release()
            raise
        return await done


REQUESTS = Lane(4, "specrun request")
"""For bodies, templates and tokenizers: a large request keeps them busy for long."""

GRAMMARS = Lane(2, "specrun grammar")
"""Grammars are compiled in processes of their own, which may take seconds of a core each."""
