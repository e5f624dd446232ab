"""A hub on the loopback: the requests of huggingface_hub that fetch a model, and their faults.

`fault` says what is wrong: a status ("404", "401", "429", "500"), "half" (files end half-way),
"once half" (the first transfer does), "wrong" (other bytes of the right length), "no json".
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class MockHub:
    """Repositories as {"OWNER/REPO": {"file": bytes}}, and every request: (path, Range)."""

    repos: dict[str, dict[str, bytes]]
    fault: str = ""
    token: str | None = None
    commit: str = COMMIT
    url: str = ""
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    @property
    def transfers(self) -> list[tuple[str, str | None]]:
        """The requests for files: their names, and the Range that was asked for."""
        files = [(path, span) for path, span in self.requests if "/resolve/" in path]
        return [(path.rpartition("/resolve/")[2].partition("/")[2], span) for path, span in files]


class _Handler(BaseHTTPRequestHandler):
    hub: MockHub

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((path, self.headers.get("Range")))
        given = self.headers.get("Authorization")
        if self.hub.token is not None and given != f"Bearer {self.hub.token}":
            self._answer(401, b"{}")
        elif self.hub.fault.isdecimal():
            wait = {"Retry-After": "7"} if self.hub.fault == "429" else {}
            self._answer(int(self.hub.fault), b"{}", **wait)
        elif path.startswith("/api/models/"):
            self._list(path.removeprefix("/api/models/"))
        else:
            repo, _, rest = path.lstrip("/").partition("/resolve/")
            content = self.hub.repos.get(repo, {}).get(rest.partition("/")[2])
            if content is None:
                self._answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
            else:
                self._send(content)

    def _list(self, repo: str) -> None:
        files = self.hub.repos.get(repo)
        if files is None:
            self._answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif self.hub.fault == "no json":
            self._answer(200, b"<html>")
        else:
            siblings = [_sibling(name, content) for name, content in files.items()]
            told = {"id": repo, "sha": self.hub.commit, "siblings": siblings}
            self._answer(200, json.dumps(told).encode())

    def _send(self, content: bytes) -> None:
        span, start = self.headers.get("Range"), 0
        if span:
            start = int(span.removeprefix("bytes=").partition("-")[0])
        body = content[start:]
        if self.hub.fault == "wrong":
            body = bytes(255 - byte for byte in body)
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(body)))
        if span:
            last = len(content) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
        self.end_headers()
        half = self.hub.fault == "half" or self.hub.fault == "once half"
        if self.hub.fault == "once half":
            self.hub.fault = ""
        self.wfile.write(body[: len(body) // 2] if half else body)
        self.close_connection = True

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _sibling(name: str, content: bytes) -> dict[str, object]:
    """Describe a file as the hub does: those with `.small` in their names are no large ones."""
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    told: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
    if ".small" not in name:
        digest = hashlib.sha256(content).hexdigest()
        told["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
    return told


@contextmanager
def mock_hub(repos: dict[str, dict[str, bytes]], fault: str = "") -> Iterator[MockHub]:
    """Serve repositories on a free port of the loopback, until the end."""
    hub = MockHub(repos, fault)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
