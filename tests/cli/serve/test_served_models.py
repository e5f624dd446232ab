"""Several models on one server: names, loads, room, idle times, and what each API says of them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.bindings.errors import ClosedError, MalformedFileError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.app import create_app
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.models import Models, ServedModel
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.memory import Room

ASK = [{"role": "user", "content": "Hi"}]
MEMORY = 10
FAILURE = MalformedFileError("/models/bad.gguf has no tensors")


@dataclass
class Desk:
    """Models that are scripted, and gates that hold up their loads.

    The log has what was done with them: "+a!" is a load while others were in use.
    """

    vocabulary: Vocabulary
    settings: ServeSettings
    sizes: dict[str, int]
    log: list[str] = field(default_factory=list)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    now: float = 0.0

    def models(self, most: int = 0) -> Models:
        listed = [self.model(name) for name in self.sizes]
        return Models(lambda: listed, self.settings, most=most, clock=lambda: self.now)

    def model(self, name: str) -> ServedModel:
        path, names = Path(f"/models/{name}.gguf"), (f"{name}.gguf", f"nick-{name}")
        return ServedModel(name, path, names, partial(self.opened, name), partial(self.room, name))

    @contextmanager
    def opened(self, name: str, is_busy: bool) -> Iterator[AnswerService]:
        if name in self.gates:
            assert self.gates[name].wait(30)
        if name == "bad":
            raise FAILURE
        self.log.append(f"+{name}" + "!" * is_busy)
        engine: Any = ScriptedEngine(self.vocabulary, HERMES, [f"I am {name}."])
        engine.slots = list
        own = ServeSettings(model=name, idle_seconds=self.settings.idle_seconds)
        yield AnswerService(engine, own)
        self.log.append(f"-{name}")

    def room(self, name: str, held: dict[str, int]) -> Room:
        size, free = self.sizes[name], MEMORY - held.get("CPU", 0)
        refusal = f"it needs {size}, and {MEMORY} are free" if size > MEMORY else ""
        return Room({"CPU": size}, size <= free, refusal)


@pytest.fixture
def desk(tool_vocabulary: Vocabulary) -> Desk:
    sizes = {"a": 4, "b": 4, "c": 4, "bad": 1, "huge": 11}
    return Desk(tool_vocabulary, ServeSettings(model="", head_seconds=0.0), sizes)


@dataclass
class Use:
    """A request that uses a model, until it is over."""

    models: Models
    name: str
    scope: dict[str, Any] = field(default_factory=dict)

    async def begin(self) -> str:
        return (await self.models.used(self.scope, self.name)).settings.model

    def end(self) -> None:
        self.models.release(self.scope)


async def used(models: Models, *names: str) -> list[Use]:
    """Begin uses one after the other."""
    uses = [Use(models, name) for name in names]
    for use in uses:
        assert await use.begin() == use.name
    return uses


async def settled() -> None:
    """Let everything happen that needs no thread."""
    for _ in range(20):
        await asyncio.sleep(0)


def finished(models: Models, work: Callable[[Models], Awaitable[None]]) -> None:
    """Run work on models; they are closed in the end."""

    async def whole() -> None:
        await work(models)
        await models.close()

    try:
        asyncio.run(whole())
    finally:
        models.unload_all()


def test_names_are_exact_and_near_ones_are_told(desk: Desk) -> None:
    models = desk.models()
    for name in ("a", "a.gguf", "A.GGUF", "nick-a", "a:latest"):
        assert models.find(name).id == "a"
    for name, said in (
        ("nik-huge", "model 'nik-huge' not found: did you mean 'huge'?"),
        ("gpt-4o", "model 'gpt-4o' not found: this server has 'a', 'b', 'c', 'bad' and 1 more"),
        ("", "model is missing: this server has 'a'"),
        (None, "model is missing"),
        (5, "model is 5: give the name of a model"),
    ):
        with pytest.raises(RequestError) as caught:
            models.find(name)
        assert str(caught.value).startswith(said)
        assert caught.value.status == (404 if "not found" in said else 400)
    desk.sizes = {"a": 4}
    assert desk.models().find("gpt-4o").id == "a"  # the only one, under any name
    models.unload_all()


def test_requests_that_come_together_load_a_model_once(desk: Desk) -> None:
    async def work(models: Models) -> None:
        uses = [Use(models, "a") for _ in range(3)]
        assert await asyncio.gather(*[use.begin() for use in uses]) == ["a"] * 3
        assert desk.log == ["+a"]

    finished(desk.models(), work)
    assert desk.log == ["+a", "-a"]


def test_the_least_recently_used_idle_model_makes_room(desk: Desk) -> None:
    async def work(models: Models) -> None:
        for name in ("a", "b", "a"):
            (use,) = await used(models, name)
            use.end()
        await used(models, "c")
        assert desk.log == ["+a", "+b", "-b", "+c"]
        assert [model.id for model, _ in models.loaded] == ["a", "c"]

    finished(desk.models(), work)


def test_as_many_as_are_wanted_are_loaded(desk: Desk) -> None:
    async def work(models: Models) -> None:
        for name in ("a", "b"):
            (use,) = await used(models, name)
            use.end()
        assert desk.log == ["+a", "-a", "+b"]

    finished(desk.models(most=1), work)


def test_a_model_in_use_goes_when_its_requests_are_over(desk: Desk) -> None:
    async def work(models: Models) -> None:
        a, b = await used(models, "a", "b")
        c, later = Use(models, "c"), Use(models, "a")
        waiting = asyncio.create_task(c.begin())
        await asyncio.to_thread(lambda: None)
        while models.find("a").leaving is None:  # planned in a thread
            await asyncio.sleep(0)
        again = asyncio.create_task(later.begin())  # behind the one that waits for its room
        await settled()
        assert not waiting.done()
        assert desk.log == ["+a", "+b!"]
        a.end()
        assert await waiting == "c"
        assert not again.done()
        b.end()
        assert await again == "a"
        assert desk.log == ["+a", "+b!", "-a", "+c!", "-b", "+a!"]

    finished(desk.models(), work)


def test_what_never_fits_is_refused_and_nothing_is_unloaded(desk: Desk) -> None:
    async def work(models: Models) -> None:
        (use,) = await used(models, "a")
        use.end()
        with pytest.raises(RequestError, match="huge was not loaded: it needs 11, and 10 are"):
            await Use(models, "huge").begin()
        assert models.find("huge").problem == "it needs 11, and 10 are free"
        assert desk.log == ["+a"]

    finished(desk.models(), work)


def test_a_file_that_cannot_be_loaded_is_said_to_all_who_asked(desk: Desk) -> None:
    async def work(models: Models) -> None:
        uses = [Use(models, "bad") for _ in range(2)]
        found = await asyncio.gather(*[use.begin() for use in uses], return_exceptions=True)
        # The folder is nobody's business.
        assert {str(error) for error in found} == {"bad was not loaded: bad.gguf has no tensors"}
        for use in uses:
            use.end()
        assert models.find("bad").is_idle
        await used(models, "a")

    finished(desk.models(), work)


def test_others_are_answered_while_a_model_is_loaded(desk: Desk) -> None:
    async def work(models: Models) -> None:
        await used(models, "a")
        gate = desk.gates["b"] = threading.Event()
        waiting = asyncio.create_task(Use(models, "b").begin())
        while models.find("b").state != "loading":
            await asyncio.sleep(0)
        await used(models, "a")
        assert not waiting.done()
        gate.set()
        assert await waiting == "b"

    finished(desk.models(), work)


def test_nothing_is_loaded_for_a_client_that_left_before_its_turn(desk: Desk) -> None:
    async def work(models: Models) -> None:
        gate = desk.gates["a"] = threading.Event()
        first = asyncio.create_task(Use(models, "a").begin())
        gone, third = Use(models, "b"), Use(models, "c")
        tasks = [asyncio.create_task(use.begin()) for use in (gone, third)]
        await settled()
        tasks[0].cancel()
        gone.end()
        gate.set()
        assert [await first, await tasks[1]] == ["a", "c"]
        assert models.find("b").state == "unloaded"
        assert desk.log == ["+a", "+c!"]

    finished(desk.models(), work)


def test_a_model_is_unloaded_when_it_was_idle_for_long(desk: Desk) -> None:
    desk.settings = ServeSettings(model="", idle_seconds=10)

    async def work(models: Models) -> None:
        uses = await used(models, "a", "b")
        desk.now = 50
        await models.unload_idle()
        assert desk.log == ["+a", "+b!"]  # both are in use
        for use in uses:
            use.end()
        own = models.find("b").service
        assert own is not None
        own.keep_seconds = None  # as keep_alive -1 has it
        desk.now = 59
        assert models.seconds_left(models.find("a")) == 1
        await models.unload_idle()
        assert desk.log == ["+a", "+b!"]
        desk.now = 60
        await models.unload_idle()
        assert desk.log == ["+a", "+b!", "-a"]
        assert models.find("a").state == "sleeping"
        await used(models, "a")
        assert desk.log[-1] == "+a"

    finished(desk.models(), work)


def test_those_that_wait_are_told_when_the_server_ends(desk: Desk) -> None:
    async def work(models: Models) -> None:
        gate = desk.gates["a"] = threading.Event()
        waiting = [asyncio.create_task(Use(models, name).begin()) for name in ("a", "b")]
        await settled()
        closing = asyncio.create_task(models.close())
        for each in waiting:
            with pytest.raises(ClosedError):
                await each
        await closing
        gate.set()

    finished(desk.models(), work)
    assert desk.log in ([], ["+a", "-a"])  # what was loaded is closed


# -- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture
def served(desk: Desk) -> Iterator[tuple[Models, TestClient]]:
    models = desk.models()
    try:
        with TestClient(create_app(models, desk.settings), "http://127.0.0.1") as client:
            yield models, client
    finally:
        models.unload_all()


def test_every_api_asks_the_model_that_it_names(served: tuple[Models, TestClient]) -> None:
    models, client = served
    chat = {"messages": ASK, "max_tokens": 50}
    for path, body, text in (
        ("/v1/chat/completions", chat, lambda r: r["choices"][0]["message"]["content"]),
        ("/v1/completions", {"prompt": "Hi"}, lambda r: r["choices"][0]["text"]),
        ("/v1/responses", {"input": "Hi"}, lambda r: r["output"][0]["content"][0]["text"]),
        ("/v1/messages", chat, lambda r: r["content"][0]["text"]),
        ("/api/chat", {"messages": ASK, "stream": False}, lambda r: r["message"]["content"]),
        ("/api/generate", {"prompt": "Hi", "stream": False}, lambda r: r["response"]),
    ):
        for name in ("b", "nick-a"):
            reply = client.post(path, json={**body, "model": name}).json()
            assert (reply["model"], text(reply)) == (name[-1], f"I am {name[-1]}."), path
        reply = client.post(path, json={**body, "model": "nick-x"})
        assert reply.status_code == 404, path
        assert "not found: did you mean" in reply.text
    for path, body in (("/tokenize", {"content": "a"}), ("/apply-template", {"messages": ASK})):
        assert client.post(path, json={**body, "model": "a"}).status_code == 200
        assert client.post(path, json=body).status_code == 400
    error = client.post("/v1/chat/completions", json={**chat, "model": "bad"})
    assert error.status_code == 500
    assert error.json()["error"]["message"] == "bad was not loaded: bad.gguf has no tensors"
    assert all(model.is_idle for model in models.models)


def test_lists_have_all_models_with_their_states(served: tuple[Models, TestClient]) -> None:
    models, client = served
    client.post("/v1/completions", json={"prompt": "Hi", "model": "a"})
    client.post("/v1/completions", json={"prompt": "Hi", "model": "bad"})
    listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert {name: each["status"]["value"] for name, each in listed.items()} == {
        "a": "loaded",
        **dict.fromkeys(("b", "c", "bad", "huge"), "unloaded"),
    }
    assert listed["a"]["aliases"] == ["a.gguf", "nick-a"]
    assert listed["bad"]["status"]["failed"] is True
    assert client.get("/v1/models/nick-a").json() == listed["a"]
    assert [each["name"] for each in client.get("/api/tags").json()["models"]] == [*listed]
    assert [each["name"] for each in client.get("/api/ps").json()["models"]] == ["a"]
    assert client.get("/props").json()["role"] == "router"
    assert client.get("/props?model=b").json()["is_sleeping"] is True
    assert models.find("b").service is None  # a path that is read loads nothing
    metrics = client.get("/metrics").text
    assert 'specrun_answers_total{finish_reason="stop",model="a"} 1.0' in metrics
    assert 'specrun_slots{model="a"} 2.0' in metrics
    assert client.get("/health").json() == {"status": "ok"}


def test_new_models_are_listed_when_that_is_asked(
    served: tuple[Models, TestClient], desk: Desk
) -> None:
    models, client = served
    client.post("/models/load", json={"model": "a"})
    first, before = models.models[:2], len(models.models)
    models._listed_now = lambda: [desk.model("b"), desk.model("new")]
    assert len(client.get("/v1/models").json()["data"]) == before
    listed = client.get("/v1/models?reload=1").json()["data"]
    # What is loaded stays, whatever lies in its place now.
    assert [each["id"] for each in listed] == ["b", "new", "a"]
    assert models.models[2] is first[0]
    assert models.find("nick-new").id == "new"
    with pytest.raises(RequestError, match="'c' not found"):
        models.find("c")


def test_clients_load_and_unload_models(served: tuple[Models, TestClient], desk: Desk) -> None:
    models, client = served
    assert client.post("/models/load", json={"model": "a"}).json() == {"success": True}
    assert client.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    assert client.post("/models/load", json={"model": "none"}).status_code == 404
    assert desk.log == ["+a", "-a"]
    reply = client.post("/api/generate", json={"model": "b", "keep_alive": "1h30m"}).json()
    assert reply["done_reason"] == "load"
    assert models.seconds_left(models.find("b")) == 5400
    (loaded,) = client.get("/api/ps").json()["models"]
    assert loaded["expires_at"] < "9999"
    for keeping in (-1, "-1", "-5m"):
        client.post("/api/chat", json={"model": "b", "messages": ASK, "keep_alive": keeping})
        assert models.seconds_left(models.find("b")) is None
    for keeping in ("soon", "5x", "", [1]):
        reply = client.post("/api/chat", json={"model": "b", "keep_alive": keeping})
        assert reply.status_code == 400, keeping
        assert "keep_alive is" in reply.json()["error"]
    reply = client.post("/api/chat", json={"model": "b", "keep_alive": 0}).json()
    assert reply["done_reason"] == "unload"
    assert models.seconds_left(models.find("b")) == 0


def sent(app: Starlette, path: str, body: dict[str, Any], seen: Callable[[bytes], None]) -> bytes:
    """Return the body of a streamed reply; `seen` is called with each piece, when it is sent."""
    data, pieces = json.dumps({**body, "stream": True}).encode(), []
    kept: list[dict[str, Any]] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if kept:
            return kept.pop()
        return await asyncio.Future[Any]()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
        else:
            pieces.append(message.get("body", b""))
            seen(pieces[-1])

    head = [(b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": head, "query_string": b""}
    asyncio.run(app({**scope, "root_path": "", "scheme": "http"}, receive, send))
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("path", "body", "failed"),
    [
        ("/v1/chat/completions", {"messages": ASK}, b'data: {"error":{"message":"bad was not'),
        ("/v1/messages", {"messages": ASK, "max_tokens": 9}, b"event: error\ndata: "),
        ("/v1/responses", {"input": "Hi"}, b'event: error\ndata: {"type":"error",'),
    ],
)
def test_a_stream_begins_before_its_model_is_loaded(
    desk: Desk, path: str, body: dict[str, Any], failed: bytes
) -> None:
    for name, said in (("a", b"I am"), ("bad", failed)):
        gate = desk.gates[name] = threading.Event()
        models = desk.models()

        def seen(piece: bytes, gate: threading.Event = gate) -> None:
            if piece.startswith(b": loading "):
                gate.set()

        try:
            reply = sent(create_app(models, desk.settings), path, {**body, "model": name}, seen)
        finally:
            models.unload_all()
        assert reply.startswith(f": loading {name}, 0%\n\n".encode())
        assert said in reply
        assert models.find(name).is_idle
