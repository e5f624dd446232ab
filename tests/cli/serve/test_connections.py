"""Connections: which are given up, how many may be open, and what never ends one."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from support.loopback_server import connected, opened, serving
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve import server
from specrun.cli.serve.settings import Bounds, ServeSettings

SOON = 10.0  # seconds, on a busy machine
STREAM = {"prompt": "a", "stream": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def engine(tool_vocabulary: Vocabulary) -> ScriptedEngine:
    return ScriptedEngine(tool_vocabulary, HERMES, script=("Hello. " * 20,))


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection; raises TimeoutError if it does not."""
    data = b""
    while True:
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:
            return data
        if not part:
            return data
        data += part


def trickled(connection: socket.socket, piece: bytes, ended: Callable[[], bool]) -> None:
    """Send a piece every now and then, until it is over or the connection is."""
    deadline = time.monotonic() + SOON
    while not ended():
        assert time.monotonic() < deadline, "the connection is still open"
        try:
            connection.sendall(piece)
        except OSError:
            return
        time.sleep(0.02)


def require_408(data: bytes) -> None:
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_header_that_stops_is_answered_408_and_closed(engine: ScriptedEngine) -> None:
    with serving(engine, bounds=Bounds(header_seconds=0.2)) as address:
        with opened(address) as silent, opened(address) as begun:
            begun.sendall(HEAD)
            require_408(rest_of(begun))
            assert rest_of(silent) == b""
        with opened(address) as used:  # the second request of a connection, too
            used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEAD)
            data = rest_of(used)
            assert data.startswith(b"HTTP/1.1 200")
            require_408(data[data.index(b"HTTP/1.1 408") :])


def test_a_header_that_trickles_is_given_up(engine: ScriptedEngine) -> None:
    with serving(engine, bounds=Bounds(header_seconds=0.3)) as address, opened(address) as slow:
        slow.sendall(HEAD)
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(rest_of(slow)))
        reader.start()
        trickled(slow, b"x-a: b\r\n", lambda: bool(said))
        reader.join(SOON)
    require_408(said[0])


def test_a_body_that_stops_is_answered_408_and_closed(engine: ScriptedEngine) -> None:
    bounds = Bounds(pause_seconds=0.2)
    with serving(engine, bounds=bounds) as address, opened(address) as stopped:
        stopped.sendall(HEAD + b"Content-Length: 100\r\n\r\n" + b'{"prompt"')
        require_408(rest_of(stopped))
    assert not engine.asked


def test_a_body_that_trickles_is_given_up(engine: ScriptedEngine) -> None:
    bounds = Bounds(body_seconds=0.3, body_rate=1 << 20)
    with serving(engine, bounds=bounds) as address, opened(address) as slow:
        slow.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(rest_of(slow)))
        reader.start()
        trickled(slow, b" ", lambda: bool(said))
        reader.join(SOON)
    require_408(said[0])


def test_a_slow_upload_that_goes_on_is_answered(engine: ScriptedEngine) -> None:
    bounds = Bounds(body_seconds=0.1, body_rate=1, pause_seconds=SOON, header_seconds=0.1)
    body = b" " * 2000 + b'{"prompt": "a"}'
    with serving(engine, bounds=bounds) as address, opened(address) as slow:
        slow.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body), 100):
            slow.sendall(body[start : start + 100])
            time.sleep(0.03)
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_body_in_the_smallest_chunks_leaves_the_loop_free(engine: ScriptedEngine) -> None:
    with serving(engine) as address, opened(address) as busy:
        head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        sent = b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n"
        sender = threading.Thread(target=busy.sendall, args=(head + sent,))
        sender.start()
        longest = 0.0
        while sender.is_alive():
            before = time.monotonic()
            assert httpx2.get(f"{address}/health", timeout=SOON).status_code == 200
            longest = max(longest, time.monotonic() - before)
        sender.join()
        assert busy.recv(1 << 10).startswith(b"HTTP/1.1 400")
    assert longest < 1.5


def test_what_is_parsed_at_once_is_little(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    receive = server.Connection.data_received

    def noting(self: server.Connection, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(server.Connection, "data_received", noting)
    with serving(engine) as address:
        content = "a" * 1_000_000
        httpx2.post(f"{address}/tokenize", json={"content": content}, timeout=SOON)
    assert sum(sizes) > 1_000_000
    assert max(sizes) <= 1 << 14


def test_a_stream_is_longer_than_all_time_limits(engine: ScriptedEngine) -> None:
    bounds = Bounds(header_seconds=0.1, body_seconds=0.1, pause_seconds=0.1)
    engine.round_size = 1
    with serving(engine, bounds=bounds) as address, connected(address, STREAM) as reader:
        data, started = b"", time.monotonic()
        while b"[DONE]" not in data:
            data += reader.recv(100)
            time.sleep(0.002)
        assert time.monotonic() - started > 0.3


def test_the_rest_of_a_body_that_is_answered_already_is_not_waited_for(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_REST_SECONDS", 0.2)
    with serving(engine) as address, opened(address) as slow:
        slow.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        said = b""
        while not said.endswith(b"}}"):
            said += slow.recv(1 << 16)
        assert said.startswith(b"HTTP/1.1 404")
        ended: list[bytes] = []
        reader = threading.Thread(target=lambda: ended.append(rest_of(slow)))
        reader.start()
        trickled(slow, b" ", lambda: bool(ended))
        reader.join(SOON)
    assert ended == [b""]


def test_a_client_that_takes_nothing_of_a_whole_reply_is_given_up(engine: ScriptedEngine) -> None:
    with serving(engine, send_seconds=0.2) as address, opened(address) as deaf:
        messages = [{"role": "user", "content": "a" * 14_000_000}]  # more than systems buffer
        body = json.dumps({"messages": messages}).encode()
        head = b"POST /apply-template HTTP/1.0\r\nHost: localhost\r\n"  # 1.0 closes behind it
        deaf.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert deaf.recv(10)
        time.sleep(1.0)
        assert len(rest_of(deaf)) < 14_000_000


@pytest.mark.parametrize("begun", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_half_open_connections_make_room_for_requests(engine: ScriptedEngine, begun: bytes) -> None:
    with serving(engine, bounds=Bounds(connections=8)) as address:
        held = [opened(address) for _ in range(30)]
        for each in held:
            each.sendall(begun)
        assert httpx2.get(f"{address}/health", timeout=SOON).status_code == 200
        for each in held[:20]:  # the first that came were the first to go
            assert rest_of(each) == b""
        for each in held:
            each.close()


def test_where_all_connections_are_at_work_new_ones_wait(
    engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script, engine.round_size = ("Hello. " * 5000,), 1
    with (
        caplog.at_level(logging.WARNING, "specrun"),
        serving(engine, bounds=Bounds(connections=2)) as address,
    ):
        held = [connected(address, STREAM) for _ in range(2)]
        for each in held:
            assert each.recv(10)
        with opened(address) as waiting:
            waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            waiting.settimeout(0.3)
            with pytest.raises(TimeoutError):
                waiting.recv(10)
            for each in held:
                assert each.recv(10)  # those go on
            held[0].close()
            waiting.settimeout(SOON)
            assert waiting.recv(1 << 10).startswith(b"HTTP/1.1 200")
        held[1].close()
    assert len([each for each in caplog.records if "new ones wait" in each.message]) == 1


def test_requests_that_are_not_whole_do_not_hold_up_the_end(engine: ScriptedEngine) -> None:
    started = time.monotonic()
    with serving(engine, drain_seconds=30.0) as address:
        held = [opened(address) for _ in range(2)]
        for each, begun in zip(held, (HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"), strict=True):
            each.sendall(begun)
        assert httpx2.get(f"{address}/health", timeout=SOON).status_code == 200
    assert time.monotonic() - started < 15
    for each in held:
        assert rest_of(each) == b""
        each.close()


def test_a_shortage_of_files_is_said_once_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_SHORTAGE_SECONDS", 0.001)

    async def main() -> None:
        loop, tries = asyncio.get_running_loop(), 0
        accept = loop.sock_accept
        came: asyncio.Event = asyncio.Event()

        async def failing(listener: socket.socket) -> Any:
            nonlocal tries
            tries += 1
            if tries < 50:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", failing)

        class Made(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                came.set()
                transport.close()

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            watched: Any = server.Connections(set(), Made, ServeSettings(model=""))  # type: ignore[arg-type]
            accepting = asyncio.create_task(watched.accept(listener))
            await asyncio.sleep(0)
            with socket.create_connection(listener.getsockname(), timeout=SOON):
                await asyncio.wait_for(came.wait(), SOON)
            accepting.cancel()

    asyncio.run(main())
    (said,) = [each for each in caplog.records if each.name.startswith("specrun")]
    assert "Too many open files" in said.message
    assert said.exc_info is None


@pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")
def test_more_half_open_connections_than_files_stop_nothing() -> None:
    code = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (120, hard));"
        "from specrun.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "serve", "--demo", "--trust", "--port", "0", "-t", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            held = [opened(address) for _ in range(200)]
            for each in held:
                each.sendall(HEAD)
            for _ in range(5):
                assert httpx2.get(f"{address}/health", timeout=SOON).status_code == 200
            for each in held:
                each.close()
            process.terminate()
            _, said = process.communicate(timeout=30)
        finally:
            if process.poll() is None:
                process.kill()
    assert process.returncode == 0
    assert "Traceback" not in said
    assert len(said) < 5000
