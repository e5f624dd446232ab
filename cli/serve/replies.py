"""Replies to requests for answers: one JSON object, or server-sent events, one a round.

What the objects and events look like is the API's own, a `ReplyForm`. A client that leaves frees
its slots within a round. A stream's errors before the first token are replies with a status, unless
that takes so long that the client should hear that it is waited for: then they are events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol, TypeVar

import msgspec
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.errors import SpecrunError
from specrun.cli.serve.errors import RequestError, anthropic_error, openai_error, request_error
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.service import Answer, AnswerService, Delta, Finish
from specrun.runtime.chat import Reply
from specrun.runtime.round import GenerationResult, TokenEvent

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_Value = TypeVar("_Value")
_ANTHROPIC = ("/v1/messages", "/messages")
_PING_SECONDS = 15
_LEFT = 499  # nginx's status for clients that left; nobody reads it but logs


@dataclass(slots=True)
class Choice:
    """A choice that is whole; its `events` are kept where log-probabilities were asked for."""

    result: GenerationResult
    finish: Finish
    reply: Reply
    events: list[TokenEvent] = field(default_factory=list)


class ReplyForm(Protocol):
    """How an API writes an answer; events are bytes as `event_bytes` makes them, b"" for none."""

    def begin(self) -> bytes:
        """Return the events before the first token."""

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a round, or of the end of a choice."""

    def end(self) -> bytes:
        """Return the events after all choices."""

    def failed(self, error: RequestError) -> bytes:
        """Return the events of an answer that cannot go on."""

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the reply that is not streamed."""


def event_bytes(payload: object, name: str = "") -> bytes:
    """Return a server-sent event with a JSON object, and a name where the API has names."""
    data = b"data: " + _encoder.encode(payload) + b"\n\n"
    return b"event: " + name.encode() + b"\n" + data if name else data


def json_reply(payload: object, status: int = 200, **headers: str) -> Response:
    """Return a reply with a JSON object."""
    body = _encoder.encode(payload)
    return Response(body, status, headers or None, media_type="application/json")


def failure(path: str, error: RequestError) -> Response:
    """Return the reply to a request for a path that fails."""
    payload = (anthropic_error if path.startswith(_ANTHROPIC) else openai_error)(error)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == HTTPStatus.REQUEST_TIMEOUT:  # what comes later belongs to no request
        headers["Connection"] = "close"
    return json_reply(payload, error.status, **headers)


async def begin(request: Request, asked: AnswerRequest) -> Answer:
    """Let the service begin an answer; where the client leaves before that, stop what it takes."""
    service: AnswerService = request.app.state.service
    begun = asyncio.ensure_future(service.begin(asked))
    try:
        if await still_there(request, begun):
            return await begun
        raise RequestError("the client left before the answer had begun")
    finally:
        if not begun.done():
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)


async def reply(request: Request, answer: Answer, form: ReplyForm, *, streamed: bool) -> Response:
    """Return the whole answer, or the events that it becomes."""
    if not streamed:
        choices = await while_connected(request, answer, collected(answer))
        return Response(status_code=_LEFT) if choices is None else json_reply(form.whole(choices))
    settings, deltas = answer.service.settings, answer.deltas()
    first = asyncio.ensure_future(anext(deltas))
    if not await still_there(request, first, settings.head_seconds):
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await deltas.aclose()
        return Response(status_code=_LEFT)
    if first.done():
        first.result()  # an error, which still has a status
    events = _events(first, deltas, form)
    return EventSourceResponse(
        events, sep="\n", ping=_PING_SECONDS, send_timeout=settings.send_seconds
    )


async def _events(
    first: asyncio.Future[Delta], deltas: AsyncGenerator[Delta], form: ReplyForm
) -> AsyncIterator[bytes]:
    try:
        async with aclosing(deltas):
            begun = form.begin()
            if begun and not first.done():
                yield begun
                begun = b""
            yield begun + form.delta(await first)
            async for delta in deltas:
                if events := form.delta(delta):
                    yield events
            yield form.end()
    except Exception as problem:
        known = isinstance(problem, SpecrunError)
        _log.log(logging.INFO if known else logging.ERROR, "an answer failed", exc_info=problem)
        yield form.failed(request_error(problem))


async def collected(answer: Answer) -> list[Choice]:
    """Return all choices of an answer, in order, when they have ended."""
    kept: dict[int, list[TokenEvent]] = {}
    replies: dict[int, Reply] = {}
    choices: dict[int, Choice] = {}
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            index = delta.index
            reply = replies.setdefault(index, Reply())
            reply.add(delta.parts)
            if answer.request.logprobs:
                kept.setdefault(index, []).extend(delta.events)
            if delta.result is not None and delta.finish is not None:
                choices[index] = Choice(delta.result, delta.finish, reply, kept.get(index, []))
    return [choices[index] for index in range(len(answer.streams))]


async def while_connected(
    request: Request, answer: Answer, work: Awaitable[_Value]
) -> _Value | None:
    """Return what `work` returns; where the client leaves before, end the answer, return None."""
    task = asyncio.ensure_future(work)
    try:
        return await task if await still_there(request, task) else None
    finally:
        if not task.done():
            task.cancel()
            answer.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def still_there(
    request: Request, work: asyncio.Future[_Value], seconds: float | None = None
) -> bool:
    """Wait for work, for so long at most; return whether the client is there then."""
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((work, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return work.done() or not gone.done()
    finally:
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
