"""/v1/responses: an input and instructions, answered by items; nothing is stored."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.body import Fields, read_body, shown
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.grammars import read_format
from specrun.cli.serve.replies import begin, json_reply, reply
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.responses.form import ResponseForm
from specrun.cli.serve.sampling import read_length, read_sampling, read_speculative
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.settings import Bounds
from specrun.cli.serve.tools.fields import (
    MOST_TOOLS,
    Tool,
    function_tool,
    plan_turn,
    read_tool_choice,
)
from specrun.cli.serve.tools.history import Message

_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def read_input(fields: Fields, bounds: Bounds) -> list[Message]:
    """Return `instructions` and `input`, a text or items; raises `RequestError` by place."""
    messages: list[Message] = []
    instructions = fields.text("instructions")
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    given = fields.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    items = None if not isinstance(given, list) else fields.items("input", bounds.messages)
    if not items:
        raise fields.wrong("input", "a text, or a list of at least one item")
    thoughts = ""
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} is {shown(item)}: give an object", where)
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts += _reasoning(item, where)
        elif kind == "function_call":
            thoughts = _add_call(messages, item, where, thoughts)
        elif kind == "function_call_output":
            messages.append(_result(item, where))
        elif kind == "message":
            messages.append(_message(item, where))
            if thoughts and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"], thoughts = thoughts, ""
        else:
            field = f"{where}.type"
            known = "message, function_call, function_call_output, reasoning"
            raise RequestError(f"{field} is {shown(kind)}: known are {known}", field)
    return _one_beginning(messages)


def _one_beginning(messages: list[Message]) -> list[Message]:
    """Return the messages with those of the system at the beginning as one.

    Clients send instructions and a developer's message; most templates take one, and only there.
    """
    roles = [message["role"] for message in messages]
    count = next((place for place, role in enumerate(roles) if role != "system"), len(roles))
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def _message(item: dict[str, Any], where: str) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        field = f"{where}.role"
        raise RequestError(f"{field} is {shown(role)}: give one of {', '.join(_ROLES)}", field)
    own = "system" if role == "developer" else role
    return {"role": own, "content": _text(item.get("content"), f"{where}.content")}


def _text(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    wanted = 'a text, or parts as {"type": "input_text", "text": "..."}'
    if not isinstance(content, list):
        raise RequestError(f"{field} is {shown(content)}: give {wanted}", field)
    texts: list[str] = []
    for place, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or text is None:
            kind = part.get("type") if isinstance(part, dict) else part
            where = f"{field}[{place}]"
            problem = f"{where} is {shown(kind)}, this model reads text: give {wanted}"
            raise RequestError(problem, where)
        texts.append(str(text))
    return "".join(texts)


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return what the model thought; only its summary is there where its server keeps the rest."""
    content = item.get("content") or item.get("summary") or []
    return _text(content, f"{where}.content")


def _add_call(messages: list[Message], item: dict[str, Any], where: str, thoughts: str) -> str:
    """Add a call to what the model said before it; return the thoughts that still wait for it."""
    call_id, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments", "{}")
    if not all(isinstance(value, str) for value in (call_id, name, arguments)):
        form = '{"type": "function_call", "call_id": "...", "name": "...", "arguments": "{}"}'
        raise RequestError(f"{where} is {shown(item)}: give {form}", where)
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    if thoughts:
        messages[-1]["reasoning_content"] = thoughts
    function = {"name": name, "arguments": arguments}
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": call_id, "type": "function", "function": function})
    return ""


def _result(item: dict[str, Any], where: str) -> Message:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        field = f"{where}.call_id"
        raise RequestError(f"{field} is {shown(call_id)}: give the call's id", field)
    output = _text(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def read_tools(fields: Fields) -> list[Tool]:
    """Return the functions in the form of chat completions; other tools are refused."""
    given = fields.items("tools", MOST_TOOLS) or []
    tools: list[Tool] = []
    for place, value in enumerate(given):
        where = f"tools[{place}]"
        kind = value.get("type") if isinstance(value, dict) else value
        if not isinstance(value, dict) or kind != "function":
            field = f"{where}.type"
            problem = f"{field} is {shown(kind)}: this server runs no tools itself"
            raise RequestError(f"{problem}, give functions", field)
        tools.append(function_tool(value, where))
    return tools


_STORED = ("previous_response_id", "conversation", "prompt")
_MOST = 2**31 - 1


async def responses(request: Request) -> Response:
    """Answer an input."""
    fields, asked = await read_body(request, read_response_request)
    answer = await begin(request, asked)
    form = ResponseForm(answer, fields)
    return await reply(request, answer, form, streamed=fields.flag("stream"))


async def input_tokens(request: Request) -> Response:
    """Return how many tokens the input's prompt has."""
    service: AnswerService = request.app.state.service
    _, asked = await read_body(request, read_response_request)
    prompts = await service.prompts.read(asked)
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
