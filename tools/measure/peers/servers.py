"""Servers under comparison: how each is started, and one client that asks all of them.

The client's clock is the only one: it counts from the request to the first piece of text, and from
there to the end of the stream. Tokens, and the drafts that were accepted, are as a server's
`timings` have them, which both programs send with the last piece.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.errors import SpecrunError

_POLL_S = 0.1
_END_S = 20.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A program with one way of drafting; `command` starts its server, --host and --port follow."""

    program: str
    drafting: str
    command: tuple[str, ...]

    @property
    def label(self) -> str:
        """The program and its drafting."""
        return f"{self.program} {self.drafting}"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as its client saw it, reasoning included; times in seconds from the request."""

    text: str
    tokens: int
    accepted: int
    first_s: float
    whole_s: float


@contextmanager
def started(peer: Peer, log: Path, wait_s: float) -> Iterator[int]:
    """Start a peer's server, yield its port when it answers, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [*peer.command, "--host", "127.0.0.1", "--port", str(port)]
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
    except OSError as error:
        raise SpecrunError(f"{peer.command[0]} cannot be started: {error.strerror}") from error
    try:
        _wait(peer, process, port, log, wait_s)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(
    peer: Peer, process: subprocess.Popen[bytes], port: int, log: Path, wait_s: float
) -> None:
    """Return when the server is healthy; raises with its last words if it ended before."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        if process.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = f": {lines[-1]}" if lines else ""
            raise SpecrunError(f"the server of {peer.label} ended at once{said}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            finally:
                connection.close()
        time.sleep(_POLL_S)
    raise SpecrunError(f"the server of {peer.label} was not ready after {wait_s:g} seconds")


def ask(port: int, request: Mapping[str, Any], timeout_s: float = 3600.0) -> Reply:
    """Have messages answered, or a "prompt" continued, as a stream.

    Raises SpecrunError for anything but a whole answer.
    """
    options = {"model": "default", "stream": True, "stream_options": {"include_usage": True}}
    body = {**options, **request}
    path = "/v1/completions" if "prompt" in request else "/v1/chat/completions"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        started_at = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            said = response.read(500).decode(errors="replace")
            raise SpecrunError(f"a server answered with status {response.status}: {said}")
        return _read(response, started_at)
    except (OSError, http.client.HTTPException) as error:
        raise SpecrunError(f"a server broke off: {error}") from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, started_at: float) -> Reply:
    pieces: list[str] = []
    timings: Mapping[str, Any] = {}
    first_s = 0.0
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        chunk = json.loads(line[len(b"data: ") :])
        if "error" in chunk:
            raise SpecrunError(f"a server broke off: {chunk['error']}")
        timings = chunk.get("timings") or timings
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            said = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            said = said or choice.get("text") or ""  # of a text that is continued
            if said:
                first_s = first_s or time.perf_counter() - started_at
                pieces.append(said)
    whole_s = time.perf_counter() - started_at
    if "predicted_n" not in timings:
        raise SpecrunError("a server's stream has no timings: it is no llama-server, or an old one")
    accepted = int(timings.get("draft_n_accepted") or 0)
    return Reply("".join(pieces), int(timings["predicted_n"]), accepted, first_s, whole_s)
