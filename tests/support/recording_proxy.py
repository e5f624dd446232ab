"""Hands requests on to a server and keeps what was sent and answered; refuses every other host.

A client's process gets its address as the base URL and as its proxy: so it reaches one server on
this machine, and the test knows what else it asked for.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_OF_ONE_HOP = {"connection", "transfer-encoding", "keep-alive", "host"}


@dataclass
class Exchange:
    """A request and its reply; `body` is the JSON that was sent, or None."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    reply: bytes = b""


@dataclass
class Recorded:
    """What went through the proxy at `address`; `refused` names hosts elsewhere."""

    address: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def sent(self, path: str) -> list[Any]:
        """The bodies of the requests to a path, in order."""
        return [one.body for one in self.exchanges if one.body is not None and path in one.path]

    @property
    def failed(self) -> list[str]:
        """The requests whose answer was an error, with the error."""
        return [
            f"{one.method} {one.path} {one.status} {one.reply[:500]!r}"
            for one in self.exchanges
            if one.status >= 400
        ]


@contextmanager
def recording(upstream: str) -> Iterator[Recorded]:
    """Listen on a free port of loopback until the block ends."""
    recorded = Recorded()

    class Handler(_Handler):
        kept = recorded
        port = urlsplit(upstream).port

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    recorded.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorded
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    kept: Recorded
    port: int | None

    def do_CONNECT(self) -> None:
        self.kept.refused.append(self.path)
        self.send_error(403, "no other host is to be reached")

    def _hand_on(self) -> None:
        if not self.path.startswith("/"):
            return self.do_CONNECT()
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _OF_ONE_HOP}
        exchange = Exchange(self.command, self.path, headers, _json(content))
        self.kept.exchanges.append(exchange)
        upstream = http.client.HTTPConnection("127.0.0.1", self.port or 80, timeout=300)
        try:
            upstream.request(self.command, self.path, content or None, headers)
            reply = upstream.getresponse()
            exchange.status = reply.status
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in _OF_ONE_HOP:
                    self.send_header(name, value)
            self.end_headers()
            while piece := reply.read1(65536):
                exchange.reply += piece
                self.wfile.write(piece)
                self.wfile.flush()
        except (ConnectionError, http.client.HTTPException):
            exchange.status = exchange.status or 599
        finally:
            upstream.close()

    do_GET = do_POST = do_HEAD = do_OPTIONS = do_DELETE = _hand_on

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing."""


def _json(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        return content
