"""/v1/messages: conversations as Anthropic's clients have them, and how many tokens one has."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.anthropic.conversation import read_choice, read_conversation, read_tools
from specrun.cli.serve.anthropic.form import MessageForm
from specrun.cli.serve.body import Fields, read_body
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.grammars import read_format
from specrun.cli.serve.replies import begin, json_reply, reply
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.sampling import read_length, read_sampling, read_speculative
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.tools.fields import plan_turn

_THINKING = ("enabled", "disabled", "adaptive", "between_tools")


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    fields, asked = await read_body(request, read_message_request)
    answer = await begin(request, asked)
    return await reply(request, answer, MessageForm(answer), streamed=fields.flag("stream"))


async def count_tokens(request: Request) -> Response:
    """Return how many tokens the conversation's prompt has."""
    service: AnswerService = request.app.state.service
    _, asked = await read_body(request, read_message_request)
    prompts = await service.prompts.read(asked)
    return json_reply({"input_tokens": len(prompts.tokens[0])})


def read_message_request(fields: Fields, service: AnswerService) -> AnswerRequest:
    """Return what is asked for; raises `RequestError` that names the field."""
    settings, bounds = service.settings, service.settings.bounds
    stop = fields.texts("stop_sequences", bounds.stop_texts, bounds.stop_length)
    # The fields of sampling have OpenAI's names but for this.
    sampled = Fields({**fields.values, "stop": None if stop is None else list(stop)})
    output = fields.fields("output_config")
    form = None if output is None else output.fields("format")
    params = read_sampling(sampled, settings, service.engine.vocabulary)
    if form is not None:
        params = params.replace(grammar=read_format(form))
    conversation = read_conversation(fields, bounds)
    prefill = ""
    if conversation[-1]["role"] == "assistant" and len(conversation) > 1:
        if "tool_calls" in conversation[-1]:
            raise RequestError("messages ends with calls: give their results", "messages")
        prefill = conversation.pop()["content"]
    choice, parallel = read_choice(fields)
    turn = plan_turn(
        service.engine,
        conversation,
        tools=read_tools(fields),
        choice=choice,
        parallel=parallel,
        template_kwargs=_template_kwargs(fields),
    )
    return AnswerRequest(
        messages=turn.messages,
        prefill=prefill,
        params=params,
        max_tokens=read_length(fields, settings),
        tools=turn.tools,
        template_kwargs=turn.template_kwargs,
        plan=turn.plan,
        speculative=read_speculative(fields),
    )


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    """Return variables of the template: `thinking` is what templates call enable_thinking."""
    given = fields.fields("chat_template_kwargs")
    kwargs = {} if given is None else dict(given.values)
    thinking = fields.fields("thinking")
    if thinking is not None:
        kind = thinking.text("type")
        if kind not in _THINKING:
            raise thinking.wrong("type", f"one of {', '.join(_THINKING)}")
        kwargs.setdefault("enable_thinking", kind != "disabled")
    return kwargs
