"""Soak of the server: thousands of requests over loopback, and nothing may grow or go wrong.

Clients ask for streams and whole answers, leave in the middle, and send malformed bodies, several
at once; at the beginning a crowd comes all at once. Every reply must have a status that is not 500
and, where it is an error, the error object; memory, handles and threads stay flat.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from measure.serve.malformed import malformed_bodies
from measure.soak.resources import Growth, Resources, growth_of, read_resources
from specrun.cli.serve.app import create_app
from specrun.cli.serve.server import server_of
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.engine import Engine

_AT_ONCE = 8
_SAMPLES = 200
_SECONDS = 60.0  # that a reply may take
_MOST_FAILURES = 20
_EXPECTED = {200, 400, 408, 413, 501, 503}


@dataclass(frozen=True, slots=True)
class ServeSoakOptions:
    """How many requests are made: in all, malformed ones among them, and in the crowd at first."""

    requests: int = 20_000
    malformed: int = 10_000
    crowd: int = 200
    seed: int = 0


@dataclass(slots=True)
class ServeSoakResult:
    """What a soak did, and what went wrong; `statuses` counts the replies by status."""

    seed: int
    seconds: float = 0.0
    requests: int = 0
    left: int = 0
    malformed: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    growth: tuple[Growth, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and nothing grew."""
        return not self.failures and all(growth.is_flat for growth in self.growth)


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request: where to, what, and after how many bytes its client leaves (None: it stays)."""

    path: str
    body: bytes
    leaves_after: int | None = None
    is_malformed: bool = False


def soak_server(
    engine: Engine, options: ServeSoakOptions, say: Callable[[str], None]
) -> ServeSoakResult:
    """Serve an engine, ask it as the options say, and return what came of it."""
    result = ServeSoakResult(options.seed)
    started = time.monotonic()
    asyncio.run(_soaked(engine, options, result, say))
    result.seconds = time.monotonic() - started
    return result


async def _soaked(
    engine: Engine, options: ServeSoakOptions, result: ServeSoakResult, say: Callable[[str], None]
) -> None:
    settings = ServeSettings(model="soak", drain_seconds=0.0)
    app = create_app(engine, settings)
    ready = asyncio.Event()
    server = server_of(app, settings, ready.set)
    samples: list[Resources] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        await ready.wait()
        port = listener.getsockname()[1]
        asks = _asks(options)
        try:
            crowd = list(islice(asks, min(options.crowd, options.requests)))
            await asyncio.gather(*(_ask(port, each, result) for each in crowd))
            step = max(_AT_ONCE, options.requests // _SAMPLES)
            while part := list(islice(asks, step)):
                await _in_turns(port, part, result)
                samples.append(read_resources())
                say(f"{result.requests:,} of {options.requests:,} requests")
                if len(result.failures) >= _MOST_FAILURES:
                    break
            await _idle(engine, result)
        finally:
            server.should_exit = True
            await serving
    result.growth = growth_of(samples)


async def _idle(engine: Engine, result: ServeSoakResult) -> None:
    """Note it where slots are busy, or requests wait, that nobody asked."""
    deadline = time.monotonic() + _SECONDS
    while (now := engine.statistics()).busy + now.queued:
        if time.monotonic() > deadline:
            result.failures.append(f"{now.busy} slots are busy when all clients have left")
            return
        await asyncio.sleep(0.01)


def _asks(options: ServeSoakOptions) -> Iterator[_Ask]:
    """Yield the requests of a soak: the same ones for a seed."""
    source = random.Random(options.seed)
    bodies = malformed_bodies(options.seed)
    share = min(1.0, options.malformed / options.requests)
    for number in range(options.requests):
        if number >= options.crowd and source.random() < share:
            path, body = next(bodies)
            yield _Ask(path, body, is_malformed=True)
            continue
        leaves = source.randrange(1, 2000) if source.random() < 0.2 else None
        yield _Ask(*_question(source), leaves)


def _question(source: random.Random) -> tuple[str, bytes]:
    """Return a path and a request that the server answers."""
    common: dict[str, Any] = {
        "max_tokens": source.choice((1, 4, 16)),
        "temperature": source.choice((0, 0.8, 1.5)),
        "stream": source.random() < 0.5,
    }
    if source.random() < 0.1:
        common["n"] = 2
    if source.random() < 0.2:
        common["speculative"] = {"drafter": "none"}
    text = f"What does os.{source.choice(('getcwd', 'path.join', 'walk', 'fork'))} do?"
    if source.random() < 0.5:
        return "/v1/completions", msgspec.json.encode({**common, "prompt": text, "logprobs": 1})
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", msgspec.json.encode({**common, "messages": messages})


async def _in_turns(port: int, asks: Sequence[_Ask], result: ServeSoakResult) -> None:
    """Make these requests, a few at a time."""
    left = iter(asks)

    async def take() -> None:
        for each in left:
            await _ask(port, each, result)

    await asyncio.gather(*(take() for _ in range(_AT_ONCE)))


async def _ask(port: int, ask: _Ask, result: ServeSoakResult) -> None:
    """Make a request on a connection of its own, and judge the reply."""
    result.requests += 1
    result.malformed += ask.is_malformed
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {ask.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(ask.body)}\r\n\r\n".encode() + ask.body)
        if ask.leaves_after is not None:
            result.left += 1
            await asyncio.wait_for(reader.read(ask.leaves_after), _SECONDS)
            return
        reply = await asyncio.wait_for(reader.read(), _SECONDS)
        problem = _problem(reply, result)
        if problem:
            result.failures.append(f"{problem}: {ask.path} {ask.body[:200]!r}")
    except (TimeoutError, ConnectionError) as error:
        result.failures.append(f"{type(error).__name__}: {ask.path} {ask.body[:200]!r}")
    finally:
        writer.close()


def _problem(reply: bytes, result: ServeSoakResult) -> str | None:
    """Return what is wrong with a reply; None if nothing is."""
    head, _, body = reply.partition(b"\r\n\r\n")
    parts = head.split(b" ", 2)
    if len(parts) < 2 or not parts[1].isdigit():
        return f"no reply ({reply[:80]!r})"
    status = int(parts[1])
    result.statuses[status] += 1
    if status not in _EXPECTED:
        return f"status {status}"
    if status == 200:
        return None
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"status {status} without an error object ({body[:80]!r})"
    return None if isinstance(message, str) and message else f"status {status} without a sentence"
