"""The server process: uvicorn on a bound socket, its end by signals, and threads beside its loop.

The first signal lets answers finish within the settings' seconds, and ends those that do not; a
second one ends everything at once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Literal, cast

import h11
import uvicorn
from sse_starlette.sse import AppStatus
from uvicorn.protocols.http.h11_impl import H11Protocol

from specrun.cli.serve.errors import RequestError, openai_error
from specrun.cli.serve.settings import ServeSettings, bound_socket, url_of

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from specrun.cli.serve.models import Models


# -- Connections: their number, and the end of those that send no request --------------------------
#
# Every connection is an open file, so there are at most as many as this process may open. One waits
# a bounded time for a request's header, for the rest of a body that is answered already, and for a
# client to read its reply; `read_body` bounds the time of a body. If all are in use, the one that
# has waited longest for its client is closed; if all wait for answers, new ones wait in the queue
# of the system.


try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)
_MOST = 1000
_SPARE = 32  # files that the server itself may still open: logs, trials, modules
_WATCH_SECONDS = 0.5
_PAUSE_SECONDS = 0.05
_SHORTAGE_SECONDS = 0.5  # after which a system that had no files may have some
_WARNING_SECONDS = 10.0  # between two lines about the same shortage
_REST_SECONDS = 10.0  # for the rest of a body whose request was answered before it was whole
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_BACKLOG = 2048
_READ_BYTES = 1 << 14

Phase = Literal["idle", "header", "body", "rest", "closing", "busy"]
"""The state of a connection that waits: its next request, the header or the body of one, the rest
of a body that is answered already, a client that takes the last bytes; or for the answer.

uvicorn's own time limit ends those that are idle.
"""


def most_connections() -> int:
    """Return how many connections may be open: the limit of open files, less the process's own."""
    if resource is None:
        return _MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    own = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else _SPARE
    return max(1, min(_MOST, soft - own - _SPARE))


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A connection of uvicorn's, with the time that it has waited for its client.

    It reads little at a time: a body may come in chunks of a byte, each of which is parsed.
    """

    _waits_for: tuple[object, ...] = ()
    _received = 0
    since = 0.0
    """When it began to wait in its present phase, as it was last seen."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.seen(time.monotonic())

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the buffer for the next bytes."""
        self._buffer = bytearray(_READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that came there."""
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take the bytes of the client, and note the phase that follows."""
        self._received += len(data)
        super().data_received(data)
        self.seen(time.monotonic())

    def seen(self, now: float) -> Phase:
        """Return its phase, and note when it began."""
        phase = self._phase()
        # A new request begins a new wait, and so do bytes of a body, and bytes that were read.
        unsent = self.transport.get_write_buffer_size() if phase == "closing" else 0
        waits_for = (phase, self.cycle, self._received if phase == "body" else unsent)
        if waits_for != self._waits_for:
            self._waits_for, self.since = waits_for, now
        return phase

    def _phase(self) -> Phase:
        if self.transport.is_closing():
            return "closing"
        if self.conn.their_state is h11.IDLE:
            has_begun = self.timeout_keep_alive_task is None or self.conn.trailing_data[0]
            return "header" if has_begun else "idle"
        if self.conn.their_state is not h11.SEND_BODY or self.cycle is None:
            return "busy"
        if self.cycle.response_complete:
            return "rest"
        return "busy" if self.cycle.response_started else "body"

    def give_up(self, settings: ServeSettings, now: float) -> None:
        """End the connection if it has waited for too long."""
        phase, waited = self.seen(now), now - self.since
        if phase == "header" and waited > settings.bounds.header_seconds:
            if self.conn.trailing_data[0]:  # it has sent a part of it
                seconds = settings.bounds.header_seconds
                problem = f"the request's header did not arrive within {seconds:g} seconds"
                body = json.dumps(openai_error(RequestError(problem, status=408)))
                head = f"HTTP/1.1 408 Request Timeout\r\nContent-Length: {len(body)}\r\n"
                head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
                self.transport.write((head + body).encode())
            self.transport.close()
        elif phase == "rest" and waited > _REST_SECONDS:
            self.transport.close()
        elif phase == "closing" and waited > settings.send_seconds:
            self.transport.abort()

    def may_end(self, now: float) -> bool:
        """Whether it can end without the loss of an answer: it has no whole request."""
        is_waiting = self.seen(now) not in ("busy", "closing")
        return is_waiting and not self.transport.get_write_buffer_size()


class Connections:
    """Accepts connections while there is room for them, and gives up those that keep nothing busy.

    `open_ones` are those that are open, as uvicorn counts them; `make` makes the protocol of one.
    """

    def __init__(
        self, open_ones: set[Connection], make: Callable[[], Connection], settings: ServeSettings
    ) -> None:
        self._open, self._make, self._settings = open_ones, make, settings
        self._most = settings.bounds.connections or most_connections()
        self._warned = -_WARNING_SECONDS

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections, for ever."""
        loop = asyncio.get_running_loop()
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as problem:
                self._warn(f"no connection can be accepted ({problem.strerror})")
                if problem.errno in _SHORTAGES:
                    self._make_room()
                await asyncio.sleep(_SHORTAGE_SECONDS)
                continue
            with suppress(OSError), ExitStack() as owned:  # it may be gone already
                owned.enter_context(client)
                await self._room()
                await loop.connect_accepted_socket(self._make, client)
                owned.pop_all()

    async def watch(self) -> None:
        """Give up connections that wait for too long, for ever."""
        limits = self._settings.bounds.header_seconds, self._settings.send_seconds
        interval = min(_WATCH_SECONDS, *(limit / 4 for limit in limits))
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            for each in [*self._open]:
                each.give_up(self._settings, now)

    def end_unasked(self) -> None:
        """End the connections whose requests are not whole: no more are taken."""
        for each in [*self._open]:
            if each.seen(time.monotonic()) in ("header", "body", "rest"):
                each.transport.abort()

    async def _room(self) -> None:
        """Wait until one more connection may be open."""
        while len(self._open) >= self._most:
            if self._make_room():
                await asyncio.sleep(0)  # in which it is taken for closed
            else:
                self._warn(f"answers are made for all {self._most} connections that may be open")
                await asyncio.sleep(_PAUSE_SECONDS)

    def _make_room(self) -> bool:
        """End the connection that waits longest for its client; return whether there is one."""
        now = time.monotonic()
        waiting = [each for each in self._open if each.may_end(now)]
        if waiting:
            min(waiting, key=attrgetter("since")).transport.abort()
        return bool(waiting)

    def _warn(self, problem: str) -> None:
        """Log a shortage, now and then: it can last long."""
        now = time.monotonic()
        if now - self._warned >= _WARNING_SECONDS:
            self._warned = now
            _log.warning("%s: new ones wait", problem)


_IDLE_SECONDS = 75  # longer than clients keep a connection that they do not use
_MORE_SECONDS = 5.0  # for the last events of answers that were ended
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
    return DrainingServer(config, app.state.models, ready)


@contextmanager
def serving_here(app: Starlette, settings: ServeSettings) -> Iterator[str]:
    """Serve on a free port of this machine, in a thread, until the block ends; yield the URL."""
    with bound_socket("127.0.0.1", 0) as listener:
        ready = threading.Event()
        server = server_of(app, settings, ready.set)
        work = {"sockets": [listener]}
        thread = threading.Thread(target=server.run, kwargs=work, name="specrun server")
        thread.start()
        try:
            ready.wait()
            yield url_of("127.0.0.1", listener)
        finally:
            server.should_exit = True
            thread.join()


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets answers end before it does."""

    def __init__(self, config: uvicorn.Config, models: Models, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._models = models
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and call `ready`."""
        await super().startup([])  # uvicorn would accept more connections than there are files
        self._connections = Connections(
            cast("set[Connection]", self.server_state.connections),
            lambda: Connection(self.config, self.server_state, self.lifespan.state),
            self._models.settings,
        )
        accepted = [self._connections.accept(each) for each in sockets or ()]
        self._accepting = [asyncio.create_task(each) for each in accepted]
        watched = self._connections.watch(), self._models.watch()
        self._watching = [asyncio.create_task(each) for each in watched]
        await asyncio.sleep(0)  # in which they begin to listen
        self._ready()

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
        draining = asyncio.create_task(self._models.close())
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()
            for watching in self._watching:
                watching.cancel()
            self._models.end_all()
            tasks = self.server_state.tasks
            if tasks:  # they send their last events, which takes a round
                await asyncio.wait(tasks, timeout=_LAST_SECONDS)
            if tasks:  # cut off in the middle: uvicorn would log each as a failure
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
