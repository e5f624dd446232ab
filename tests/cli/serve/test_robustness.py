"""A server among clients that leave, wait, read slowly or fail, and its end among them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from support.loopback_server import connected, serving

from specrun.bindings.errors import DecodeFailedError
from specrun.cli.serve.app import create_app
from specrun.cli.serve.server import server_of
from specrun.cli.serve.settings import Bounds, ServeSettings
from specrun.runtime.engine import Engine

ENDLESS = {"prompt": "os.", "ignore_eos": True, "stream": True, "max_tokens": 1500}
PATH = "/v1/completions"


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


def n_busy(engine: Engine) -> int:
    statistics = engine.statistics()
    return statistics.busy + statistics.queued


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_left_frees_its_slot_within_a_round(
    demo_engine: Engine, streamed: bool
) -> None:
    with serving(demo_engine) as address:
        connection = connected(address, {**ENDLESS, "stream": streamed})
        if streamed:
            assert connection.recv(10)
        else:
            wait_until(lambda: n_busy(demo_engine) == 1)
        connection.close()
        before = demo_engine.statistics().load.evaluations
        wait_until(lambda: n_busy(demo_engine) == 0)
        # The rounds until the event loop hears of it, and one; the answer would have taken 1500.
        assert demo_engine.statistics().load.evaluations - before < 150


def test_a_client_that_leaves_the_queue_leaves_nothing_behind(demo_engine: Engine) -> None:
    with serving(demo_engine) as address:
        long = [connected(address, ENDLESS) for _ in range(2)]
        wait_until(lambda: n_busy(demo_engine) == 2)
        waiting = connected(address, ENDLESS)
        wait_until(lambda: n_busy(demo_engine) == 3)
        waiting.close()
        wait_until(lambda: n_busy(demo_engine) == 2)
        for connection in long:
            connection.close()
        wait_until(lambda: n_busy(demo_engine) == 0)


def test_a_stream_that_waits_for_long_begins_all_the_same(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrun.runtime.engine.schedule import Schedule

    with serving(demo_engine, head_seconds=0.05) as address:
        long = [connected(address, ENDLESS) for _ in range(2)]
        wait_until(lambda: demo_engine.statistics().busy == 2)

        def failing(*_: object) -> None:
            raise DecodeFailedError("the backend failed", -3)

        monkeypatch.setattr(Schedule, "_begin", failing)
        waiting = connected(address, ENDLESS)
        assert b"200 OK" in waiting.recv(1 << 12)  # before its turn has come
        assert n_busy(demo_engine) == 3
        for connection in long:
            connection.close()
        data = b""
        while b"the backend failed" not in data:  # what has no status any more is an event
            part = waiting.recv(1 << 16)
            assert part
            data += part
        waiting.close()
        wait_until(lambda: n_busy(demo_engine) == 0)


def test_a_slow_reader_gets_it_all_and_holds_up_nobody(demo_engine: Engine) -> None:
    with serving(demo_engine) as address:
        fields = {**ENDLESS, "max_tokens": 100, "stream_options": {"include_usage": True}}
        slow = connected(address, fields)
        quick = httpx2.post(address + PATH, json={**fields, "stream": False}, timeout=60).json()
        wait_until(lambda: n_busy(demo_engine) == 0)
        data = b""
        while b"[DONE]" not in data:
            data += slow.recv(1 << 16)
        slow.close()
    *_, last = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert json.loads(last)["usage"]["completion_tokens"] == 100
    assert quick["usage"]["completion_tokens"] == 100


def test_a_reader_that_takes_nothing_for_long_is_given_up(demo_engine: Engine) -> None:
    app = create_app(demo_engine, ServeSettings(model="demo", send_seconds=0.05))
    ended: list[str] = []
    app.state.models.find().service.observers.append(
        lambda result: ended.append(result.finish_reason)
    )

    async def main() -> None:
        body = json.dumps(ENDLESS).encode()
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if asked:
                return asked.pop()
            await asyncio.sleep(60)
            raise AssertionError("nobody waits for so long")

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b""}
        with pytest.raises(TimeoutError):
            await app({**scope, "headers": [(b"host", b"localhost")], "app": app}, receive, send)

    asyncio.run(asyncio.wait_for(main(), 20))
    wait_until(lambda: n_busy(demo_engine) == 0)
    assert app.state.models.find().service.n_choices == 0


def in_process(app: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)


def test_200_clients_wait_their_turn_and_all_are_answered(demo_engine: Engine) -> None:
    app = create_app(demo_engine, ServeSettings(model="demo"))

    async def main() -> list[Any]:
        async with in_process(app) as client:
            body = {"max_tokens": 2, "temperature": 0}
            return await asyncio.gather(
                *(client.post(PATH, json={**body, "prompt": f"os.{i}"}) for i in range(200))
            )

    replies = asyncio.run(main())
    assert {reply.status_code for reply in replies} == {200}
    assert all(reply.json()["usage"]["completion_tokens"] for reply in replies)
    assert app.state.models.find().service.n_choices == 0


def test_more_clients_than_the_queue_holds_are_told_so(demo_engine: Engine) -> None:
    settings = ServeSettings(model="demo", bounds=Bounds(queue=8))
    app = create_app(demo_engine, settings)

    async def main() -> list[int]:
        async with in_process(app) as client:
            body = {"prompt": "os.", "max_tokens": 20, "ignore_eos": True}
            replies = await asyncio.gather(*(client.post(PATH, json=body) for _ in range(40)))
            return [reply.status_code for reply in replies]

    statuses = asyncio.run(main())
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 10  # two slots and the queue


def test_an_error_of_a_conversation_does_not_touch_another(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrun.runtime.engine.schedule import Schedule

    app = create_app(demo_engine, ServeSettings(model="demo"))
    begin = Schedule._begin

    def failing(schedule: Schedule, session: Any, answer: Any) -> None:
        if len(answer.request.prompt) > 20:
            raise DecodeFailedError("the backend failed", -3)
        begin(schedule, session, answer)

    async def main(failed: bool) -> list[Any]:
        async with in_process(app) as client:
            body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "prompt": "import os"}
            asked = [client.post(PATH, json=body)]
            if failed:
                broken = {**body, "prompt": "os " * 30}
                asked += [client.post(PATH, json={**broken, "stream": s}) for s in (True, False)]
            return await asyncio.gather(*asked)

    (alone,) = asyncio.run(main(failed=False))
    monkeypatch.setattr(Schedule, "_begin", failing)
    good, *bad = asyncio.run(main(failed=True))
    assert [reply.status_code for reply in bad] == [500, 500]
    assert "the backend failed" in bad[0].json()["error"]["message"]
    assert good.json()["choices"] == alone.json()["choices"]


def test_a_defect_is_an_error_object_too(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(demo_engine, ServeSettings(model="demo"))
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(demo_engine, "submit", broken)

    async def main() -> Any:
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(PATH, json={"prompt": "a"})

    reply = asyncio.run(main())
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert reply.json()["error"]["type"] == "server_error"


# -- its end ---------------------------------------------------------------------------------------


def ended_during_answers(
    engine: Engine, drain_seconds: float, n_tokens: int
) -> tuple[list[Any], float]:
    """Tell a server to end while it answers two streams and a third waits; return their texts."""
    settings = ServeSettings(model="demo", drain_seconds=drain_seconds)
    ready = threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = server_of(create_app(engine, settings), settings, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert ready.wait(20)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        connections = [connected(address, {**ENDLESS, "max_tokens": n_tokens}) for _ in range(3)]
        wait_until(lambda: n_busy(engine) == 3)
        server.should_exit = True
        started = time.monotonic()
        said = []
        for connection in connections:
            data = b""
            while part := connection.recv(1 << 16):
                data += part
                if b"[DONE]" in data or b'"error"' in data:
                    break
            connection.close()
            said.append(data)
        thread.join(30)
        assert not thread.is_alive()
    return said, time.monotonic() - started


def test_answers_finish_when_the_server_ends(demo_engine: Engine) -> None:
    said, _ = ended_during_answers(demo_engine, 30.0, 60)
    assert all(b'"finish_reason":"length"' in data for data in said)


def test_answers_that_do_not_finish_say_that_they_were_ended(demo_engine: Engine) -> None:
    said, seconds = ended_during_answers(demo_engine, 0.0, 1500)
    assert sum(b'"finish_reason":"abort"' in data for data in said) == 2
    assert sum(b"503 Service Unavailable" in data for data in said) == 1
    assert seconds < 10.0
    assert n_busy(demo_engine) == 0
