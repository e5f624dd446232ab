"""Chat completions: /v1/chat/completions, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.body import Fields, read_body
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.openai.asking import MOST_TOP, read_request, wants_usage
from specrun.cli.serve.openai.figures import chat_logprobs
from specrun.cli.serve.openai.form import OpenAIForm
from specrun.cli.serve.openai.messages import message_of, read_messages, said_of
from specrun.cli.serve.replies import Choice, begin, event_bytes, reply
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.service import Answer, AnswerService, Delta
from specrun.cli.serve.tools.fields import read_turn


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
