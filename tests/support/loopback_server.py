"""A server over any engine: in a thread, on a port of this machine, or in this process."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from starlette.testclient import TestClient

from specrun.cli.serve.app import create_app
from specrun.cli.serve.server import serving_here
from specrun.cli.serve.settings import ServeSettings


@contextmanager
def serving(engine: Any, **settings: Any) -> Iterator[str]:
    """Serve until the block ends; gives the address, without /v1."""
    chosen = ServeSettings(**{"model": "tiny", "drain_seconds": 0.5, **settings})
    with serving_here(create_app(engine, chosen), chosen) as address:
        yield address


def client_of(engine: Any, **settings: Any) -> TestClient:
    """A client of a server in this process."""
    app = create_app(engine, ServeSettings(**{"model": "tiny", **settings}))
    return TestClient(app, base_url="http://127.0.0.1:8080")


def posted(engine: Any, path: str, **body: Any) -> Any:
    """The reply to a request of such a client."""
    with client_of(engine) as client:
        return client.post(path, json=body)


def objects_of(stream: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream's events."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def events_of(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The objects of a stream of OpenAI's, whose end is looked at."""
    reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    return objects_of(reply.text)


def opened(address: str) -> socket.socket:
    """A connection to a server, on which nothing was sent."""
    place = urlsplit(address)
    return socket.create_connection((place.hostname, place.port), timeout=20)


def connected(address: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion was asked for; nothing is read."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    connection = opened(address)
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    return connection
