"""A server under grammars that take too much: on every API it refuses them, and serves and ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import pytest
from support.hostile_grammars import endless_schema, gbnf_chain, lark_chain, reference_chain
from support.loopback_server import connected, serving

from specrun.runtime import Engine
from specrun.runtime.grammar import compiled as compiler

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}
PROMPT = {"prompt": "os.", "max_tokens": 2}


def format_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo("none", slots=2, n_threads=1) as engine:
        yield engine


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": format_of(reference_chain(4000))}),
        ("/v1/chat/completions", {**CHAT, "grammar": gbnf_chain(4000)}),
        ("/v1/chat/completions", {**CHAT, "grammar": "%llguidance {}\n" + lark_chain(4000)}),
        ("/v1/completions", {**PROMPT, "json_schema": reference_chain(4000)}),
        (
            "/v1/responses",
            {
                "input": "hi",
                "max_output_tokens": 20,
                "text": {
                    "format": {"type": "json_schema", "name": "x", "schema": reference_chain(4000)}
                },
            },
        ),
    ],
)
def test_deep_grammars_are_answered(engine: Engine, path: str, body: dict[str, Any]) -> None:
    with serving(engine) as address:
        assert httpx2.post(address + path, json=body, timeout=60).status_code == 200
        assert httpx2.get(f"{address}/health").status_code == 200


def test_what_takes_too_long_is_a_400(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.3)
    with serving(engine) as address:
        body = {**CHAT, "response_format": format_of(endless_schema())}
        reply = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "response_format"
    assert "takes longer than" in error["message"]


@contextmanager
def left_open(address: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request that is sent, and not answered when the block begins."""
    with connected(address, body) as connection:
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        yield connection


def test_clients_that_leave_take_their_grammars_along(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 600.0)
    with serving(engine) as address:
        for k in range(8):  # more than are compiled at once
            with left_open(
                address, {**PROMPT, "json_schema": {**endless_schema(), "title": str(k)}}
            ):
                pass
        body = {**PROMPT, "grammar": 'root ::= "yes"'}
        reply = httpx2.post(f"{address}/v1/completions", json=body, timeout=60)
        assert reply.json()["choices"][0]["text"] == "yes"


def test_grammars_keep_nothing_else_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 600.0)
    with serving(engine) as address:
        with ExitStack() as opened:
            for k in range(8):
                schema = {**endless_schema(), "title": str(k)}
                opened.enter_context(left_open(address, {**PROMPT, "json_schema": schema}))
            reply = httpx2.post(f"{address}/v1/chat/completions", json=CHAT, timeout=60)
            assert reply.status_code == 200


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_a_server_whose_grammars_are_being_compiled(signals: int) -> None:
    code = (
        "from specrun.runtime.grammar import compiled; compiled.COMPILE_SECONDS = 600.0\n"
        "from specrun.cli.main import main; main()"
    )
    serve = ["serve", "--demo", "--trust", "--port", "0", "-np", "1", "--drain", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *serve], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with left_open(address, {**PROMPT, "json_schema": endless_schema()}):
                with left_open(address, {**PROMPT, "grammar": gbnf_chain(20_000)}):
                    for _ in range(signals):
                        process.send_signal(signal.SIGTERM)
                        time.sleep(0.1)
                    assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                process.kill()
