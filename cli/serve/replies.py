"""Replies to requests for answers: one JSON object, or server-sent events, one a round.

The form of objects and events is the API's own, a `ReplyForm`. A client that leaves frees its slots
within a round. An error before the first token is a reply with a status. If the first token takes
long, the stream begins without it, and an error is an event.
"""

from __future__ import annotations

import asyncio
import logging
import types
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    MutableMapping,
    Sequence,
)
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Send

from specrun.bindings.errors import SpecrunError
from specrun.cli.serve.body import UNPACKERS, GivenBody, read_body
from specrun.cli.serve.errors import RequestError, anthropic_error, openai_error, request_error
from specrun.cli.serve.models import Models, ServedModel
from specrun.cli.serve.sampling import AnswerBody
from specrun.cli.serve.service import AnswerRequest, AnswerService, Delta, Ending, ServedAnswer
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.chat import CallBegun, Content, MoreArguments, Part, Reasoning, Reply
from specrun.runtime.round import TokenEvent

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_Value = TypeVar("_Value")
_Body = TypeVar("_Body", bound=AnswerBody)
Endpoint = Callable[[Request], Awaitable[Response]]
_ANTHROPIC = ("/v1/messages", "/messages")
_OLLAMA = "/api/"
_LEFT = 499  # nginx's status for clients that left, for the log
_PING_SECONDS, _NEVER = 15, 365 * 86_400  # without an event, until a comment is sent


class ReplyForm(ABC):
    """The form of an API's answers: a translator of deltas, into events or into one object.

    Events are bytes as `event_bytes` makes them, b"" for none.
    """

    media_type = "text/event-stream"
    has_comments = True
    """Whether a stream may have comments, which show that its answer is still being made."""

    def __init__(self, answer: ServedAnswer, _body: Any) -> None:  # noqa: ANN401 - the API's own
        self._answer = answer

    def begin(self) -> bytes:
        """Return the events before the first token."""
        return b""

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """Return the events of a round, or of the end of a choice."""

    def end(self) -> bytes:
        """Return the events after all choices."""
        return b""

    @classmethod
    def refused(cls, error: RequestError) -> bytes:
        """Return the events of a stream whose answer does not begin."""
        return event_bytes(openai_error(error))

    def failed(self, error: RequestError) -> bytes:
        """Return the events of an answer that cannot go on."""
        return self.refused(error)

    @abstractmethod
    def whole(self, choices: Sequence[Delta]) -> object:
        """Return the reply that is not streamed, of choices that are whole."""


def parts_of(reply: Reply) -> list[Part]:
    """Return the parts of a reply that is whole, as a stream has them: no text if it only calls."""
    parts: list[Part] = [Reasoning(reply.reasoning)] if reply.reasoning else []
    if reply.content or not reply.calls:
        parts.append(Content(reply.content))
    for index, call in enumerate(reply.calls):
        parts += [CallBegun(index, call.name), MoreArguments(index, call.arguments)]
    return parts


def event_bytes(payload: object, name: str = "") -> bytes:
    """Return a server-sent event with a JSON object, and a name if the API has names."""
    data = b"data: " + _encoder.encode(payload) + b"\n\n"
    return b"event: " + name.encode() + b"\n" + data if name else data


def line_bytes(payload: object) -> bytes:
    """Return a line with a JSON object."""
    return _encoder.encode(payload) + b"\n"


def json_reply(payload: object, status: int = 200, **headers: str) -> Response:
    """Return a reply with a JSON object."""
    body = _encoder.encode(payload)
    return Response(body, status, headers or None, media_type="application/json")


def models_of(request: Request) -> Models:
    """Return the models of the server."""
    models: Models = request.app.state.models
    return models


def failure(path: str, error: RequestError) -> Response:
    """Return the reply to a request for a path that fails."""
    if path.startswith(_OLLAMA):
        payload: dict[str, Any] = {"error": str(error)}
    else:
        payload = (anthropic_error if path.startswith(_ANTHROPIC) else openai_error)(error)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == HTTPStatus.REQUEST_TIMEOUT:  # later bytes belong to no request
        headers["Connection"] = "close"
    if error.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        headers["Accept-Encoding"] = ", ".join(UNPACKERS)
    return json_reply(payload, error.status, **headers)


def answering(
    kind: type[_Body],
    read: Callable[[_Body, AnswerService], AnswerRequest],
    form: type[ReplyForm],
) -> Endpoint:
    """Return the endpoint of an API: its body, the request in it, and the form of its answers.

    If a model takes long to load, a stream of events begins before, and an error is an event.
    """

    async def endpoint(request: Request) -> Response:
        given = await GivenBody.of(request, kind)
        body, models = given.fields, models_of(request)

        async def begun() -> ServedAnswer:
            service = await models.used(request.scope, body.model)
            return await service.begin(await given.run(lambda: read(body, service)))

        model = models.find(body.model)
        beginning = asyncio.ensure_future(begun())
        may_wait = body.stream and form.has_comments and not model.is_ready
        try:
            limit = models.settings.head_seconds if may_wait else None
            answer = await _finished(request, beginning, limit)
        except TimeoutError:
            events = _late_events(model, beginning, form, body)
            return _event_stream(events, form, models.settings, model)
        except ClientDisconnect:
            raise RequestError("the client left before the answer had begun") from None
        return await (_stream if body.stream else _whole)(request, answer, form(answer, body))

    return endpoint


def counting(
    kind: type[_Body], read: Callable[[_Body, AnswerService], AnswerRequest], **more: str
) -> Endpoint:
    """Return the endpoint that counts the tokens of a request's prompt."""

    async def endpoint(request: Request) -> Response:
        _, service, asked = await read_body(request, kind, read)
        prompts = await service.prompts.read(asked)
        return json_reply({**more, "input_tokens": len(prompts.tokens[0])})

    return endpoint


async def _whole(request: Request, answer: ServedAnswer, form: ReplyForm) -> Response:
    """Return the answer as one object; end it if the client leaves before that."""
    try:
        return json_reply(form.whole(await _finished(request, collected(answer))))
    except ClientDisconnect:
        return Response(status_code=_LEFT)
    finally:
        answer.cancel()


async def _stream(request: Request, answer: ServedAnswer, form: ReplyForm) -> Response:
    """Return the events of an answer."""
    settings, deltas = answer.service.settings, answer.deltas()
    first = asyncio.ensure_future(anext(deltas))
    if not await _still_there(request, first, settings.head_seconds):
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await deltas.aclose()
        return Response(status_code=_LEFT)
    if first.done():
        first.result()  # an error, which still has a status
    return _event_stream(_events(first, deltas, form), type(form), settings)


def _event_stream(
    events: AsyncIterator[bytes],
    form: type[ReplyForm],
    settings: ServeSettings,
    model: ServedModel | None = None,
) -> EventStream:
    """Return the reply with these events, in the media type of a form.

    Comments between them show how much of the `model` is loaded.
    """

    def comment() -> ServerSentEvent:
        assert model is not None
        return ServerSentEvent(comment=_progress(model), sep="\n")

    return EventStream(
        events,
        media_type=form.media_type,
        sep="\n",
        ping=_PING_SECONDS if form.has_comments else _NEVER,
        ping_message_factory=comment if model else None,
        send_timeout=settings.send_seconds,
    )


class EventStream(EventSourceResponse):
    """A stream of events that limits the time of a send only if its client has to be waited for.

    Nearly every event is sent at once. A timer for each takes about as long as all else of it here.
    """

    async def _send_with_timeout(self, send: Send, message: MutableMapping[str, Any]) -> None:
        """Send a message; raise `SendTimeoutError` if the client takes nothing for long."""
        sending = send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        await super()._send_with_timeout(lambda _: _going_on(sending, waits_for), message)


@types.coroutine
def _going_on(sending: Generator[Any, Any, None], waits_for: object) -> Generator[Any, Any, None]:
    """Continue with a reply that has begun to be sent, and waits."""
    try:
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # a timeout, or the end of the stream
                waits_for = sending.throw(error)
            else:
                waits_for = sending.send(value)
    except StopIteration:
        return


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


def _progress(model: ServedModel) -> str:
    if model.state == "loading":
        return f"loading {model.id}, {model.progress:.0%}"
    return f"{model.id} is {model.state}"


async def _late_events(
    model: ServedModel,
    beginning: asyncio.Future[ServedAnswer],
    form: type[ReplyForm],
    body: AnswerBody,
) -> AsyncIterator[bytes]:
    """Yield a comment, and then the events of an answer that begins when its model is loaded."""
    yield f": {_progress(model)}\n\n".encode()
    try:
        answer = await beginning
    except Exception as problem:
        yield form.refused(request_error(problem))
        return
    deltas = answer.deltas()
    async for events in _events(asyncio.ensure_future(anext(deltas)), deltas, form(answer, body)):
        yield events


async def collected(answer: ServedAnswer) -> list[Delta]:
    """Return all choices of an answer, in order, each as one delta, when they have ended."""
    replies = [Reply() for _ in answer.streams]
    events: list[list[TokenEvent]] = [[] for _ in answer.streams]
    choices: dict[int, Delta] = {}
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            index = delta.index
            replies[index].add(delta.parts)
            if answer.request.logprobs:
                events[index].extend(delta.events)
            if delta.ending is not None:
                text, parts = delta.ending.result.text, parts_of(replies[index])
                choices[index] = Delta(index, text, parts, events[index], ending=delta.ending)
    return [choices[index] for index in range(len(answer.streams))]


# -- Clients that leave ----------------------------------------------------------------------------


async def _finished(
    request: Request, work: Awaitable[_Value], seconds: float | None = None
) -> _Value:
    """Return the result of work; stop it and raise `ClientDisconnect` if the client leaves.

    Raises `TimeoutError` if it takes longer than `seconds`: it goes on.
    """
    task = asyncio.ensure_future(work)
    goes_on = False
    try:
        if not await _still_there(request, task, seconds):
            raise ClientDisconnect
        goes_on = not task.done()
        if goes_on:
            raise TimeoutError
        return task.result()
    finally:
        if not task.done() and not goes_on:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _still_there(
    request: Request, work: asyncio.Future[_Value], seconds: float | None = None
) -> bool:
    """Wait for work, for so long at most; return whether the client is there then."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((work, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return work.done() or not gone.done()
    finally:
        gone.cancel()


# -- Forms of items --------------------------------------------------------------------------------


class ItemForm(ReplyForm):
    """The form of newer APIs: reasoning, text and calls are items in a row.

    Each item begins, grows and ends before the next one. An answer that is whole is made of the
    same items as a stream, whose events are then not sent.
    """

    def __init__(self, answer: ServedAnswer, body: Any) -> None:  # noqa: ANN401 - the API's own
        super().__init__(answer, body)
        self._items: list[dict[str, Any]] = []
        self._kind: type[Part] | None = None  # of the item that is open
        self._ending: Ending | None = None

    @abstractmethod
    def _begin_item(self, part: Part) -> bytes:
        """Add an item for a part, without its text; return the events."""

    @abstractmethod
    def _grow_item(self, text: str) -> bytes:
        """Add a text to the last item; return the events."""

    @abstractmethod
    def _end_item(self) -> bytes:
        """Return the events that end the last item."""

    @abstractmethod
    def _object(self) -> object:
        """Return the answer that is whole."""

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a round's parts."""
        self._ending = delta.ending
        return b"".join([self._part(part) for part in delta.parts])

    def end(self) -> bytes:
        """Return the events that end the last item; an answer without any has an empty text."""
        empty = b"" if self._items else self._part(Content(""))
        return empty + self._close()

    def whole(self, choices: Sequence[Delta]) -> object:
        """Return the answer, of one choice."""
        (choice,) = choices
        for part in choice.parts:
            self._part(part)
        self._ending = choice.ending
        self._close()
        return self._object()

    def _part(self, part: Part) -> bytes:
        kind = CallBegun if isinstance(part, MoreArguments) else type(part)
        begun = b""
        if kind is not self._kind or isinstance(part, CallBegun):
            closed = self._close()
            self._kind = kind
            begun = closed + self._begin_item(part)
        return begun if isinstance(part, CallBegun) else begun + self._grow_item(part.text)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return self._end_item()
