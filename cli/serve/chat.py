"""Chat completions: /v1/chat/completions, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.body import Fields, read_body, shown
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.replies import Choice, OpenAIForm, begin, chat_logprobs, event_bytes, reply
from specrun.cli.serve.sampling import read_length, read_sampling, read_speculative
from specrun.cli.serve.service import Answer, AnswerRequest, AnswerService, Delta, Prompt
from specrun.cli.serve.settings import Bounds
from specrun.cli.serve.tools import ChatTurn, ReplyPlan, read_turn
from specrun.runtime.chat import CallBegun, Content, Part, Reasoning, Reply

# -- Fields that chat completions and completions share: how, how much, and how many --------------


MOST_TOP = 20
"""OpenAI's limit of likely tokens beside each."""

_NO_TURN = ChatTurn(())


def read_request(
    fields: Fields,
    service: AnswerService,
    *,
    turn: ChatTurn = _NO_TURN,
    prompts: Sequence[Prompt] = (),
    top_logprobs: int | None,
) -> AnswerRequest:
    """Return what is asked for; raises `RequestError` that names the field.

    `top_logprobs` None asks for no log-probabilities at all.
    """
    settings = service.settings
    n = fields.integer("n", 1, settings.bounds.choices) or 1
    best_of = fields.integer("best_of", 1, settings.bounds.choices)
    if best_of not in (None, n):
        problem = f"best_of is {best_of}: all choices that are made are returned"
        raise RequestError(f"{problem}, so give n alone", "best_of")
    return AnswerRequest(
        messages=turn.messages,
        prompts=prompts,
        params=read_sampling(fields, settings, service.engine.vocabulary),
        max_tokens=read_length(fields, settings),
        n=n,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        tools=turn.tools,
        template_kwargs=turn.template_kwargs,
        plan=turn.plan,
        speculative=read_speculative(fields),
    )


def wants_usage(fields: Fields) -> bool:
    """Whether a stream is to end with a chunk about usage."""
    options = fields.fields("stream_options")
    return options is not None and options.flag("include_usage")


# -- Messages of chat requests, their contents as text, and those of replies, whole and in pieces -


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(fields: Fields, bounds: Bounds) -> list[dict[str, Any]]:
    """Return the messages, each with its content as a text; raises `RequestError` by place."""
    given = fields.items("messages", bounds.messages)
    if not given:
        raise RequestError("messages is missing or empty: give at least one message", "messages")
    return [_message(value, f"messages[{place}]") for place, value in enumerate(given)]


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(
            f"{where} is {shown(value)}: give an object with role and content", where
        )
    role = value.get("role")
    if role not in _ROLES:
        field = f"{where}.role"
        raise RequestError(f"{field} is {shown(role)}: give one of {', '.join(_ROLES)}", field)
    content = _content(value.get("content"), f"{where}.content", required=role != "assistant")
    # "developer" is OpenAI's newer name, which templates do not know.
    own = "system" if role == "developer" else role
    return {**value, "role": own, "content": content}


def _content(content: object, field: str, *, required: bool) -> str:
    """Return a text, the texts of several parts joined; "" for null where that is allowed."""
    if isinstance(content, str):
        return content
    if content is None and not required:
        return ""
    wanted = 'a text, or parts as {"type": "text", "text": "..."}'
    if not isinstance(content, list):
        raise RequestError(f"{field} is {shown(content)}: give {wanted}", field)
    return "".join(_texts(content, field, wanted))


def _texts(parts: Sequence[object], field: str, wanted: str) -> list[str]:
    texts: list[str] = []
    for place, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            where = f"{field}[{place}]"
            raise RequestError(
                f"{where} is {shown(kind)}, this model reads text: give {wanted}", where
            )
        texts.append(text)
    return texts


def message_of(reply: Reply, plan: ReplyPlan) -> dict[str, Any]:
    """Return a reply as a message: its content is null where it only calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            _begun(plan.new_id(), call.name, call.arguments) for call in reply.calls
        ]
    return message


def said_of(parts: Sequence[Part], plan: ReplyPlan) -> dict[str, Any]:
    """Return the `delta` of a chunk: what a round said, a call's arguments piece by piece."""
    said: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, Content):
            said["content"] = said.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            said["reasoning_content"] = said.get("reasoning_content", "") + part.text
        elif isinstance(part, CallBegun):
            calls[part.index] = {"index": part.index, **_begun(plan.new_id(), part.name, "")}
        else:
            call = calls.setdefault(
                part.index, {"index": part.index, "function": {"arguments": ""}}
            )
            call["function"]["arguments"] += part.text
    if calls:
        said["tool_calls"] = [*calls.values()]
    return said


def _begun(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    fields, asked = await read_body(request, read_chat)
    answer = await begin(request, asked)
    form = ChatForm(answer, with_usage=wants_usage(fields))
    return await reply(request, answer, form, streamed=fields.flag("stream"))


def read_chat(fields: Fields, service: AnswerService) -> AnswerRequest:
    """Return what a chat request asks for; raises `RequestError` that names the field."""
    top = fields.integer("top_logprobs", 0, MOST_TOP) or 0
    logprobs = fields.flag("logprobs")
    if top and not logprobs:
        raise RequestError("top_logprobs needs logprobs: give true for it, too", "top_logprobs")
    messages = read_messages(fields, service.settings.bounds)
    turn = read_turn(fields, service.engine, messages)
    return read_request(fields, service, turn=turn, top_logprobs=top if logprobs else None)


class ChatForm(OpenAIForm):
    """Chat completions and their chunks, as OpenAI writes them."""

    def __init__(self, answer: Answer, *, with_usage: bool = False) -> None:
        super().__init__(answer, "chatcmpl", "chat.completion.chunk", with_usage=with_usage)

    def delta(self, delta: Delta) -> bytes:
        """Return a chunk with a round's text; at the end of a choice one that says why."""
        index, events = delta.index, b""
        if index not in self._begun:
            self._begun.add(index)
            events += self._chunk(index, {"role": "assistant", "content": ""})
        if delta.parts or delta.traces or (delta.events and self._answer.request.logprobs):
            said = said_of(delta.parts, self._answer.request.plan)
            events += self._chunk(index, said or {"content": ""}, delta=delta)
        if delta.finish is not None:
            events += self._chunk(index, {}, finish=delta.finish)
        return events

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        *,
        delta: Delta | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": content, "finish_reason": finish}
        if delta is not None and self._answer.request.logprobs:
            choice["logprobs"] = chat_logprobs(delta.events, self._answer.service.engine.vocabulary)
        traced = {"specrun": {"rounds": delta.traces}} if delta is not None and delta.traces else {}
        return event_bytes({**self._common, "choices": [choice], **traced})

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return a chat completion."""
        common = {**self._common, "object": "chat.completion"}
        listed = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**common, "choices": listed, **self._summary()}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._answer.request.logprobs:
            logprobs = chat_logprobs(choice.events, self._answer.service.engine.vocabulary)
        return {
            "index": index,
            "message": message_of(choice.reply, self._answer.request.plan),
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }
