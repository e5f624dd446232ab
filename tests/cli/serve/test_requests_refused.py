"""Requests that are refused: the right status, OpenAI's error object, a sentence with the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.loopback_server import client_of
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.cli.serve.app import create_app
from specrun.cli.serve.settings import Bounds, ServeSettings
from specrun.runtime.engine import Engine

USER = [{"role": "user", "content": "Hi"}]
Clients = Callable[..., TestClient]


@pytest.fixture
def clients(demo_engine: Engine) -> Clients:
    """Clients of servers with settings of their own."""

    return partial(client_of, demo_engine, model="demo")


def error_of(reply: Any, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    (name, error), *more = reply.json().items()
    assert (name, more) == ("error", [])
    assert set(error) == {"message", "type", "param", "code"}
    assert re.fullmatch(r"[^\n]{10,300}", error["message"])
    found: dict[str, Any] = error
    return found


COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 33}, "n"),
    ({"prompt": "a", "n": True}, "n"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "dynatemp_exponent": -1}, "dynatemp_exponent"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "mirostat": 3}, "mirostat"),
    ({"prompt": "a", "samplers": ["tpo_k"]}, "samplers"),
    ({"prompt": "a", "samplers": 7}, "samplers"),
    ({"prompt": "a", "seed": "x"}, "seed"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "stop": [["a"]]}, "stop"),
    ({"prompt": "a", "stop": ["a"] * 33}, "stop"),
    ({"prompt": "a", "stop": "a" * 1025}, "stop"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logit_bias": {"x y z": "1"}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [[1, 2, 3]]}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [[1, None]]}, "logit_bias"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": 1}, "stream_options"),
    ({"prompt": "a", "stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
    ({"prompt": "a", "speculative": 3}, "speculative"),
    ({"prompt": "a", "speculative": {"nmax": 3}}, "speculative.nmax"),
    ({"prompt": "a", "speculative.n_mx": 3}, "speculative.n_mx"),
    ({"prompt": "a", "speculative": {"n_max": -1}}, "speculative.n_max"),
    ({"prompt": "a", "speculative": {"drafter": 1}}, "speculative.drafter"),
    ({"prompt": "a", "speculative": {"drafter": "medusa"}}, "speculative"),
    ({"prompt": "a", "speculative": {"drafter": "draft(("}}, "speculative"),
    ({"prompt": "a", "accept": "tipical"}, "speculative"),
    ({"prompt": "a", "accept": 3}, "accept"),
]


@pytest.mark.parametrize(("body", "param"), COMPLETIONS)
def test_a_completion_is_refused_by_field(
    client: TestClient, body: dict[str, Any], param: str
) -> None:
    error = error_of(client.post("/v1/completions", json=body), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    word = param.rpartition(".")[2] if param != "speculative" else ""
    assert word in error["message"]


@pytest.mark.parametrize("length", [1.5, "2.5", "many", True, 10**30])
@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/completions", "max_tokens", {"prompt": "a"}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": USER}),
        ("/v1/responses", "max_output_tokens", {"input": "a"}),
        ("/v1/messages", "max_tokens", {"messages": USER}),
        ("/infill", "n_predict", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_a_length_that_is_no_count_is_refused_by_every_api(
    client: TestClient, path: str, name: str, body: dict[str, Any], length: object
) -> None:
    reply = client.post(path, json={**body, name: length})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"{name} is ")


MESSAGES = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [*USER, {"content": "Hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "logprobs": 3}, "logprobs"),
    ({"messages": USER * 5000}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), MESSAGES)
def test_a_conversation_is_refused_by_field(
    client: TestClient, body: dict[str, Any], param: str
) -> None:
    assert error_of(client.post("/v1/chat/completions", json=body), 400)["param"] == param


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_longer_than_the_context_is_an_error_with_a_status(
    client: TestClient, streamed: bool
) -> None:
    body = {"prompt": "os " * 3000, "stream": streamed}
    error = error_of(client.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"


LONG = "os " * 3000
TOO_LONG: list[tuple[list[dict[str, str]], str]] = [
    ([{"role": "user", "content": LONG}], "context_length_exceeded"),
    (
        [{"role": "system", "content": "Hi"}, *USER, {"role": "user", "content": LONG}],
        "context_length_exceeded",
    ),
    ([{"role": "system", "content": LONG}, *USER], "instructions_too_long"),
]


@pytest.mark.parametrize(("messages", "code"), TOO_LONG)
def test_agents_are_told_whether_a_shorter_conversation_would_fit(
    client: TestClient, messages: list[dict[str, str]], code: str
) -> None:
    error = error_of(client.post("/v1/chat/completions", json={"messages": messages}), 400)
    assert error["code"] == code
    system = [each["content"] for each in messages if each["role"] == "system"]
    talk = [each for each in messages if each["role"] != "system"]
    body = {"messages": talk, "max_tokens": 4, "system": "".join(system) or "Hi"}
    told = client.post("/v1/messages", json=body)
    assert told.status_code == 400
    is_known = told.json()["error"]["message"].startswith("prompt is too long")
    assert is_known is (code == "context_length_exceeded")  # by Claude Code


@pytest.mark.parametrize(
    "body",
    [b"", b"[1", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": "\\ud800"', b"{'a': 1}"],
)
def test_a_body_that_is_no_object_is_refused(client: TestClient, body: bytes) -> None:
    assert "body" in error_of(client.post("/v1/completions", content=body), 400)["message"]


@pytest.mark.parametrize("depth", [70, 100_000])
def test_a_body_that_is_nested_deeply_is_refused(client: TestClient, depth: int) -> None:
    body = b'{"prompt": "a", "user": ' + b"[" * depth + b"]" * depth + b"}"
    assert "deeper" in error_of(client.post("/v1/completions", content=body), 400)["message"]
    flat = b'{"prompt": "a", "max_tokens": 1, "user": ' + b"[" * 60 + b"]" * 60 + b"}"
    assert client.post("/v1/completions", content=flat).status_code == 200


def test_a_body_that_is_too_large_is_refused(clients: Clients) -> None:
    with clients(bounds=Bounds(body_bytes=1000)) as client:
        error = error_of(client.post("/v1/completions", json={"prompt": "a" * 1000}), 413)
        assert error["code"] == "request_too_large"

        def parts() -> Any:
            for _ in range(100):
                yield b"a" * 100

        # Without a length that was announced, too.
        error_of(client.post("/v1/completions", content=parts()), 413)
        assert (
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        )


def test_paths_and_methods_that_there_are_not(client: TestClient) -> None:
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert "POST" in error_of(client.get("/v1/completions"), 405)["message"]
    error = error_of(client.get("/v1/models/gpt-9"), 404)
    assert error["code"] == "model_not_found"
    assert error_of(client.post("/v1/embeddings", json={"input": "a"}), 501)["message"]


def test_a_model_without_a_template_takes_no_messages(tiny_small_vocab: Path) -> None:
    with Engine(tiny_small_vocab, "none", slots=1, context=ContextOptions(**F32)) as engine:
        with client_of(engine) as client:
            reply = client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2})
            error = error_of(reply, 400)
            assert (error["param"], "/v1/completions" in error["message"]) == ("messages", True)
            assert str(tiny_small_vocab.parent) not in reply.text
            body = {"prompt": [1, 2, 3], "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
            assert client.get("/props").json()["chat_template"] == ""


# -- who may ask -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost:8080", "127.0.0.1", "[::1]:80", "127.1.2.3:5", "a.localhost:8080"]
)
def test_names_of_this_machine_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"Host": host}).json() == {"status": "ok"}


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", "", "@"],
)
def test_other_names_are_refused_on_loopback(
    clients: Clients, client: TestClient, host: str
) -> None:
    assert error_of(client.get("/v1/models", headers={"Host": host}), 403)
    with clients(host="0.0.0.0", api_keys=("k",)) as exposed:  # there every name may be ours
        assert exposed.get("/health", headers={"Host": host}).status_code == 200


def test_pages_of_other_origins_are_refused_unless_asked_for(clients: Clients) -> None:
    evil, good = {"Origin": "http://evil.example"}, {"Origin": "https://good.example"}
    own = {"Origin": "http://127.0.0.1:8080"}
    body = {"prompt": "a", "max_tokens": 1}
    with clients() as client:
        assert client.post("/v1/completions", json=body, headers=own).status_code == 200
        for headers in (evil, good, {"Origin": "null"}):
            reply = client.post("/v1/completions", json=body, headers=headers)
            assert "--cors" in error_of(reply, 403)["message"]
            assert "access-control-allow-origin" not in reply.headers
    with clients(cors=("https://good.example",)) as client:
        error_of(client.post("/v1/completions", json=body, headers=evil), 403)
        reply = client.post("/v1/completions", json=body, headers=good)
        assert reply.headers["access-control-allow-origin"] == "https://good.example"
        asked = {**good, "Access-Control-Request-Method": "POST"}
        preflight = client.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
    with clients(cors=("*",)) as client:
        assert client.post("/v1/completions", json=body, headers=evil).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer first2"},
        {"Authorization": "Bearer"},
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
        {"X-Api-Key": "firs"},
        {"Authorization": b"Bearer \xff\xe9"},
    ],
)
def test_without_a_key_nothing_is_answered(clients: Clients, headers: dict[str, Any]) -> None:
    with clients(api_keys=("first", "second")) as client:
        for path in ("/v1/models", "/slots", "/metrics", "/v1/nothing"):
            error = error_of(client.get(path, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        assert client.get("/health", headers=headers).status_code == 200


def test_each_key_is_taken(clients: Clients) -> None:
    with clients(api_keys=("first", "second")) as client:
        for headers in (
            {"Authorization": "Bearer first"},
            {"authorization": "bearer second"},
            {"X-Api-Key": "second"},
        ):
            assert client.get("/v1/models", headers=headers).status_code == 200


def test_keys_are_compared_in_constant_time(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        seen.append((given, key))
        return given == key

    monkeypatch.setattr("specrun.cli.serve.app.hmac.compare_digest", compare)
    with clients(api_keys=("first", "second")) as client:
        client.get("/v1/models", headers={"Authorization": "Bearer first"})
    assert seen == [(b"first", b"first"), (b"first", b"second")]


def test_a_queue_that_is_full_says_when_to_come_back(clients: Clients) -> None:
    with clients(bounds=replace(Bounds(), queue=0)) as client:
        body = {"prompt": "a", "max_tokens": 1}
        assert client.post("/v1/completions", json={**body, "n": 2}).status_code == 200
        reply = client.post("/v1/completions", json={**body, "n": 3})
        assert error_of(reply, 503)["code"] == "overloaded"
        assert int(reply.headers["retry-after"]) > 0


PAGE = {"Origin": "https://good.example"}
ALLOWED = "access-control-allow-origin"


@pytest.mark.parametrize("origin", ["https://good.example", "*"])
def test_pages_read_why_they_are_refused(clients: Clients, origin: str) -> None:
    shown = origin if origin == "*" else PAGE["Origin"]
    with clients(cors=(origin,), api_keys=("secret",)) as client:
        without_key = client.post("/v1/completions", json={"prompt": "a"}, headers=PAGE)
        key = {**PAGE, "Authorization": "Bearer secret"}
        wrong = client.post("/v1/completions", json={"prompt": 5}, headers=key)
        unknown = client.get("/v1/nothing", headers=key)
        packed = client.post("/v1/completions", headers={**key, "Content-Encoding": "br"})
        replies = (without_key, wrong, unknown, packed)
    assert [reply.status_code for reply in replies] == [401, 400, 404, 415]
    assert [reply.headers[ALLOWED] for reply in replies] == [shown] * 4


def test_pages_read_that_the_server_failed(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(demo_engine, ServeSettings(model="demo", cors=("*",)))
    monkeypatch.setattr(app.state.models.find().service, "begin", None)
    client = TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False)
    with client:
        reply = client.post("/v1/completions", json={"prompt": "a"}, headers=PAGE)
    assert (reply.status_code, reply.headers[ALLOWED]) == (500, "*")


def test_pages_of_the_web_may_ask_a_private_network(clients: Clients) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
        "Access-Control-Request-Private-Network": "true",
    }
    with clients(cors=(PAGE["Origin"],), api_keys=("secret",)) as client:
        reply = client.options("/v1/chat/completions", headers={**PAGE, **asked})
        foreign = client.options(
            "/v1/chat/completions", headers={"Origin": "http://evil.example", **asked}
        )
    assert reply.status_code == 200
    assert reply.headers[ALLOWED] == PAGE["Origin"]
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
    assert foreign.status_code in (400, 403)
    assert ALLOWED not in foreign.headers
