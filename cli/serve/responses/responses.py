"""/v1/responses: an input and instructions, answered by items; nothing is stored."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.body import Fields, read_body
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.grammars import read_format
from specrun.cli.serve.replies import json_reply, reply
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.responses.form import ResponseForm
from specrun.cli.serve.responses.items import read_input, read_tools
from specrun.cli.serve.sampling import read_length, read_sampling, read_speculative
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.tools.fields import plan_turn, read_tool_choice

_STORED = ("previous_response_id", "conversation", "prompt")
_MOST = 2**31 - 1


async def responses(request: Request) -> Response:
    """Answer an input."""
    service: AnswerService = request.app.state.service
    fields = await read_body(request, service.settings.bounds)
    answer = await service.begin(read_response_request(fields, service))
    form = ResponseForm(answer, fields)
    return await reply(request, answer, form, streamed=fields.flag("stream"))


async def input_tokens(request: Request) -> Response:
    """Return how many tokens the input's prompt has."""
    service: AnswerService = request.app.state.service
    fields = await read_body(request, service.settings.bounds)
    prompts = await service.prompts.read(read_response_request(fields, service))
    counted = len(prompts.tokens[0])
    return json_reply({"object": "response.input_tokens", "input_tokens": counted})


def read_response_request(fields: Fields, service: AnswerService) -> AnswerRequest:
    """Return what is asked for; raises `RequestError` that names the field."""
    settings = service.settings
    for name in _STORED:
        if name in fields:
            raise RequestError(f"{name}: this server stores no responses, send the input", name)
    if fields.flag("background"):
        raise RequestError("background: this server answers at once, leave it out", "background")
    text = fields.fields("text")
    form = None if text is None else text.fields("format")
    params = read_sampling(fields, settings, service.engine.vocabulary)
    if form is not None:
        params = params.replace(grammar=read_format(form))
    most = fields.integer("max_output_tokens", 0, _MOST)
    turn = plan_turn(
        service.engine,
        read_input(fields, settings.bounds),
        tools=read_tools(fields),
        choice=read_tool_choice(fields),
        parallel=fields.flag("parallel_tool_calls", default=True),
        template_kwargs=_template_kwargs(fields),
    )
    return AnswerRequest(
        messages=turn.messages,
        params=params,
        max_tokens=read_length(fields, settings) if most is None else most,
        tools=turn.tools,
        template_kwargs=turn.template_kwargs,
        plan=turn.plan,
        speculative=read_speculative(fields),
    )


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    """Return variables of the template: the effort of reasoning is one that some have."""
    given = fields.fields("chat_template_kwargs")
    kwargs = {} if given is None else dict(given.values)
    reasoning = fields.fields("reasoning")
    effort = None if reasoning is None else reasoning.text("effort")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs
