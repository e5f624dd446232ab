"""Cost of a round in the server: processor time of the event loop, beside bare streams.

The same rounds of an engine that computes nothing are streamed in three ways, one after the other
in one run: by the server, whole as it is; by a bare starlette stream that waits for the same
rounds and sends events that were written before; and by one that waits for nothing. The client is
another process. Processor time of the event loop's thread is what is measured, so that neither the
client nor whatever else runs on the machine is in it.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from specrun.cli.serve.app import create_app
from specrun.cli.serve.server import server_of
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.engine import GenerationStream
from specrun.runtime.engine.answer import Answer
from specrun.runtime.engine.answer import Request as AnswerRequest
from specrun.runtime.engine.choices import AnswerOptions
from specrun.runtime.engine.core import EngineStatistics
from specrun.runtime.engine.schedule import Load
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import GenerationResult, SpecStats, TokenEvent
from specrun.runtime.round.results import Usage

if TYPE_CHECKING:
    from specrun.bindings.models.vocabulary import Vocabulary
    from specrun.runtime.engine import Engine

_TEXT = " something"
_TEMPLATE = "{{ messages[0].content }}"
_STATS = SpecStats(
    drafter="none",
    rule="exact",
    exact=True,
    rounds=1,
    drafted=0,
    accepted=0,
    acceptance_rate=None,
    mean_accepted_length=None,
    acceptance_by_position=(),
    tokens_per_second=None,
    prompt_tokens_per_second=None,
    time_to_first_token_s=None,
    target_s=0.0,
    drafter_s=0.0,
    overhead_s=0.0,
    wall_s=0.0,
)
_CLIENT = """
import socket, sys
for line in sys.stdin:
    port, path = line.split()
    body = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": true}'
    head = f"POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.sendall(head.encode() + body)
        data = b""
        while not data.endswith(b"0\\r\\n\\r\\n"):
            part = connection.recv(1 << 16)
            if not part:
                break
            data += part
    print(data.count(b"data: "), flush=True)
"""


@dataclass(frozen=True, slots=True)
class ServeCost:
    """Microseconds of the event loop for each of `rounds` events: medians of the repetitions.

    `paced_us` is the bare stream that waits for the same rounds, `bare_us` the one that waits for
    nothing; `ratio` compares the server with the first of them.
    """

    api: str
    rounds: int
    tokens_per_round: int
    server_us: float
    paced_us: float
    bare_us: float

    @property
    def ratio(self) -> float:
        """The server's cost over that of the bare stream of the same rounds."""
        return self.server_us / self.paced_us


@dataclass(slots=True)
class PacedEngine:
    """An engine that computes nothing: rounds of the same tokens, one every `seconds`."""

    rounds: int
    tokens: int
    seconds: float
    n_ctx: int = 1024
    drafter: str = "none"

    @property
    def vocabulary(self) -> Any:  # noqa: ANN401 - what the server reads of one
        """A vocabulary of one text."""
        return SimpleNamespace(
            size=256,
            end_of_generation=frozenset(),
            special_texts=(),
            adds_bos=False,
            bos=None,
            fewest_tokens=lambda _: 0,
            tokenize_prompt=lambda *_, **__: [1, 2, 3],
            with_bos=lambda tokens: tokens,
            tokenize=lambda *_, **__: [1, 2, 3],
            pieces=lambda tokens: [_TEXT.encode()] * len(tokens),
        )

    @property
    def chat_template(self) -> Any:  # noqa: ANN401 - a ChatTemplate
        """A template of messages alone."""
        from specrun.runtime.chat import ChatTemplate

        return ChatTemplate(_TEMPLATE)

    @property
    def options(self) -> Any:  # noqa: ANN401 - what the server reads of them
        """Options that say nothing."""
        return SimpleNamespace(chat_template=_TEMPLATE, accept="exact")

    @property
    def model(self) -> Any:  # noqa: ANN401 - what the server reads of it
        """A model that there is not."""
        return SimpleNamespace(path="scripted", chat_template=None, n_ctx_train=1024, n_params=1)

    def statistics(self) -> EngineStatistics:
        """Return that there is room."""
        return EngineStatistics(1, 0, 0, self.n_ctx, 0, Load())

    def submit(self, prompt: Sequence[int], _params: object, **_: object) -> GenerationStream:
        """Begin to say the rounds, in a thread."""
        request = AnswerRequest(list(prompt), SamplingParams(), 0, AnswerOptions())
        answer = Answer(request, cast("Vocabulary", self.vocabulary))
        stream = GenerationStream(answer)

        def say() -> None:
            for number in range(self.rounds):
                time.sleep(self.seconds)
                events = [TokenEvent(_TEXT, 7, "drafted", number, None) for _ in range(self.tokens)]
                answer.put(events)
            n_tokens = self.rounds * self.tokens
            usage = Usage(len(prompt), n_tokens, 0)
            answer.end(GenerationResult(_TEXT * n_tokens, [], "length", usage, _STATS, 0))

        threading.Thread(target=say, daemon=True).start()
        return stream


def measure_cost(
    rounds: int, tokens: int, repetitions: int, say: Callable[[str], None]
) -> list[ServeCost]:
    """Return the cost of each API's rounds."""
    return asyncio.run(_measured(rounds, tokens, repetitions, say))


async def _measured(
    rounds: int, tokens: int, repetitions: int, say: Callable[[str], None]
) -> list[ServeCost]:
    engine = cast("Engine", PacedEngine(rounds, tokens, 0.001))
    settings = ServeSettings(model="paced")
    app = create_app(engine, settings)
    events = _Events(engine)
    app.router.routes += [
        Route("/paced", events.paced, methods=["POST"]),
        Route("/bare", events.bare, methods=["POST"]),
    ]
    ready = asyncio.Event()
    server = server_of(app, settings, ready.set)
    found: list[ServeCost] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        await ready.wait()
        client = await _start_client(listener.getsockname()[1])
        try:
            for api, path in (("completions", "/v1/completions"), ("chat", "/v1/chat/completions")):
                events.like(_event(api))
                spent: dict[str, list[float]] = {path: [], "/paced": [], "/bare": []}
                for repetition in range(-1, repetitions):  # the first one warms up
                    say(f"{api}, repetition {repetition + 1} of {repetitions}")
                    for each, seconds in spent.items():
                        taken = await client.loop_seconds(each, rounds)
                        if repetition >= 0:
                            seconds.append(1e6 * taken / rounds)
                medians = [statistics.median(seconds) for seconds in spent.values()]
                found.append(ServeCost(api, rounds, tokens, *medians))
        finally:
            await client.close()
            server.should_exit = True
            await serving
    return found


def _event(api: str) -> Mapping[str, Any]:
    """Return an event as the server writes them for a round."""
    text = {"text": _TEXT} if api == "completions" else {"delta": {"content": _TEXT}}
    kind = "text_completion" if api == "completions" else "chat.completion.chunk"
    choice = {"index": 0, **text, "finish_reason": None}
    common = {"id": "cmpl-" + 24 * "0", "object": kind, "created": 1_700_000_000, "model": "paced"}
    return {**common, "choices": [choice]}


class _Events:
    """The bare streams: of events that were written before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._data = b""

    def like(self, event: Mapping[str, Any]) -> None:
        """Send this event for every round from now on."""
        self._data = b"data: " + msgspec.json.encode(event) + b"\n\n"

    async def paced(self, request: Request) -> Response:
        """Wait for the rounds of the engine, and send an event for each."""
        await request.body()
        stream = self._engine.submit([1], None)

        async def events() -> AsyncIterator[bytes]:
            async for _ in stream.rounds():
                yield self._data

        return StreamingResponse(events(), media_type="text/event-stream")

    async def bare(self, request: Request) -> Response:
        """Send as many events, without waiting."""
        await request.body()
        rounds = cast(PacedEngine, self._engine).rounds

        async def events() -> AsyncIterator[bytes]:
            for _ in range(rounds):
                yield self._data

        return StreamingResponse(events(), media_type="text/event-stream")


_MOST_STREAMS = 20


@dataclass(slots=True)
class _Client:
    """The process that asks: told what, it answers with how many events came."""

    process: asyncio.subprocess.Process
    port: int

    async def loop_seconds(self, path: str, rounds: int) -> float:
        """Return the processor time of this thread while the client reads a stream.

        On a busy machine rounds are joined into fewer events: such a stream is read again.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        count = 0
        for _ in range(_MOST_STREAMS):
            started = time.thread_time()
            self.process.stdin.write(f"{self.port} {path}\n".encode())
            count = int(await self.process.stdout.readline())
            taken = time.thread_time() - started
            if count >= rounds // 2:
                return taken
        raise AssertionError(f"{path}: {count} events of {rounds}, {_MOST_STREAMS} times")

    async def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


async def _start_client(port: int) -> _Client:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, stdin=pipe, stdout=pipe
    )
    return _Client(process, port)
