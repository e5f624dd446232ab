"""The server process: uvicorn on a bound socket, its end by signals, and threads beside its loop.

The first signal lets answers finish within the settings' seconds, and ends those that do not; a
second one ends everything at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakKeyDictionary

import uvicorn
from sse_starlette.sse import AppStatus

from specrun.cli.serve.http.connections import Connection, Connections
from specrun.cli.serve.settings import ServeSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from specrun.cli.serve.service import AnswerService

_Result = TypeVar("_Result")


class Lane:
    """Threads beside the loop for one kind of work: so many at once, and more of it waits.

    What waits is dropped with its client. What is under way goes on, and keeps its place, but does
    not keep the process from ending.
    """

    def __init__(self, width: int, name: str) -> None:
        self._width, self._name = width, name
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Return what `work` returns, in another thread; raises what it raises."""
        loop = asyncio.get_running_loop()
        free = self._free.setdefault(loop, asyncio.Semaphore(self._width))
        done: asyncio.Future[_Result] = loop.create_future()

        def tell(result: _Result | None, problem: BaseException | None) -> None:
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
                loop.call_soon_threadsafe(tell, result, problem)

        await free.acquire()
        try:
            threading.Thread(target=attempt, name=self._name, daemon=True).start()
        except BaseException:
            free.release()
            raise
        return await done


_REQUESTS = Lane(4, "specrun request")
"""A request can make templates and tokenizers busy for long; more than these wait."""
GRAMMARS = Lane(2, "specrun grammar")
"""Grammars are compiled in processes of their own, which may take seconds of a core each."""

_IDLE_SECONDS = 75  # longer than clients keep a connection that they do not use
_MORE_SECONDS = 5.0  # in which answers that were ended say so
_LAST_SECONDS = 1.0  # the same after a second signal


def run_server(
    app: Starlette, settings: ServeSettings, listener: socket.socket, ready: Callable[[], None]
) -> None:
    """Serve until a signal comes; `ready` is called when the server listens."""
    server_of(app, settings, ready).run(sockets=[listener])


def server_of(
    app: Starlette, settings: ServeSettings, ready: Callable[[], None] = lambda: None
) -> DrainingServer:
    """Return a server of the application; `run` it, or `await serve` it."""
    # Streams end when their answers do, not because a signal came.
    AppStatus.enable_automatic_graceful_drain = False
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds + _MORE_SECONDS),
    )
    return DrainingServer(config, app.state.service, ready)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets answers end before it does."""

    def __init__(
        self, config: uvicorn.Config, service: AnswerService, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup([])  # uvicorn would accept more connections than there are files
        self._connections = Connections(
            cast("set[Connection]", self.server_state.connections),
            self._connection,
            self._service.settings,
        )
        accepted = [self._connections.accept(each) for each in sockets or ()]
        self._accepting = [asyncio.create_task(each) for each in accepted]
        self._watching = asyncio.create_task(self._connections.watch())
        await asyncio.sleep(0)  # in which they begin to listen
        self._ready()

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; at the second signal end at once."""
        # Not uvicorn's way, which raises the signal again at the end: the models are closed first.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and wait for the answers that are under way."""
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._connections.end_unasked()
        draining = asyncio.create_task(self._service.close())
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()
            self._watching.cancel()
            self._service.end_all()
            await self._last_words()

    async def _last_words(self) -> None:
        """Let answers that were ended say so, which takes a round, where their clients listen."""
        tasks = self.server_state.tasks
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        if tasks:  # cut off in the middle: uvicorn would log each as a failure
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


async def beside_the_loop(work: Callable[[], _Result]) -> _Result:
    """Return what `work` returns, in another thread; raises what it raises."""
    return await _REQUESTS.run(work)
