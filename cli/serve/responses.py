"""/v1/responses: an input and instructions, answered by items; nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.body import Fields, read_body, shown
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.replies import (
    Choice,
    begin,
    event_bytes,
    json_reply,
    reply,
    speculation_of,
    timings_of,
    usage_of,
)
from specrun.cli.serve.sampling import read_format, read_length, read_sampling, read_speculative
from specrun.cli.serve.service import Answer, AnswerRequest, AnswerService, Delta, Finish
from specrun.cli.serve.settings import Bounds
from specrun.cli.serve.tools import (
    MOST_TOOLS,
    Message,
    Tool,
    function_tool,
    plan_turn,
    read_tool_choice,
)
from specrun.runtime.chat import CallBegun, Content, MoreArguments, Part, Reasoning

# -- Responses as items of reasoning, text and calls, whole or as events that begin, grow and end -


Item = dict[str, Any]
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user")
"""Fields of a request that a response repeats."""


class ResponseForm:
    """A response, whole or as numbered events."""

    def __init__(self, answer: Answer, fields: Fields) -> None:
        self._answer = answer
        self._fields = fields
        self._items: list[Item] = []
        self._is_open = False
        self._number = 0
        self._reasoning = ""
        self._finish: Finish | None = None

    # -- whole -------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the response object."""
        (choice,) = choices
        reply = choice.reply
        parts: list[Part] = [Reasoning(reply.reasoning)] if reply.reasoning else []
        if reply.content or not reply.calls:
            parts.append(Content(reply.content))
        for index, call in enumerate(reply.calls):
            parts += [CallBegun(index, call.name), MoreArguments(index, call.arguments)]
        for part in parts:
            self._part(part)
        self._finish = choice.finish
        self._close()
        return self._response(self._status())

    # -- as events ---------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the events that begin the response."""
        response = self._response("in_progress")
        return self._event("created", response=response) + self._event(
            "in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a round's parts."""
        if delta.finish is not None:
            self._finish = delta.finish
        return b"".join([self._part(part) for part in delta.parts])

    def end(self) -> bytes:
        """Return the events that end the last item and the response."""
        empty = b"" if self._items else self._part(Content(""))
        closed = self._close()
        status = self._status()
        return empty + closed + self._event(status, response=self._response(status))

    def failed(self, error: RequestError) -> bytes:
        """Return the event of a response that failed."""
        problem = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._response("failed"), "error": problem}
        return self._event("failed", response=response)

    def _event(self, kind: str, **fields: object) -> bytes:
        kind = f"response.{kind}"
        payload = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event_bytes(payload, kind)

    # -- items -------------------------------------------------------------------------------------

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            return self._begin_item(self._call(part))
        kind = self._items[-1]["type"] if self._is_open else None
        begun = b""
        if isinstance(part, Reasoning):
            self._reasoning += part.text
            if kind != "reasoning":
                item = {"type": "reasoning", "id": self._id("rs"), "summary": [], "content": []}
                begun = self._begin_item(item) + self._begin_text("reasoning_text")
        elif isinstance(part, Content) and kind != "message":
            item = {"type": "message", "id": self._id("msg"), "role": "assistant", "content": []}
            begun = self._begin_item(item) + self._begin_text("output_text")
        return begun + self._grow(part.text)

    def _call(self, part: CallBegun) -> Item:
        return {
            "type": "function_call",
            "id": self._id("fc"),
            "call_id": self._answer.request.plan.new_id(),
            "name": part.name,
            "arguments": "",
        }

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._answer.id}{len(self._items)}"

    def _begin_item(self, item: Item) -> bytes:
        closed = self._close()
        self._items.append({**item, "status": "in_progress"})
        self._is_open = True
        return closed + self._event("output_item.added", **self._place(), item=self._items[-1])

    def _begin_text(self, kind: str) -> bytes:
        part: Item = {"type": kind, "text": ""}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        return self._event("content_part.added", **self._place(), **self._of_item(), part=part)

    def _grow(self, text: str) -> bytes:
        item = self._items[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            where = {**self._place(), "item_id": item["id"]}
            return self._event("function_call_arguments.delta", **where, delta=text)
        part = item["content"][0]
        part["text"] += text
        where = {**self._place(), **self._of_item()}
        if part["type"] == "output_text":
            where["logprobs"] = []
        return self._event(f"{part['type']}.delta", **where, delta=text)

    def _close(self) -> bytes:
        """Return the events that end the item that is open."""
        if not self._is_open:
            return b""
        self._is_open = False
        item, place = self._items[-1], self._place()
        is_cut = self._finish in ("length", "abort")  # the last item's finish is known by then
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            where = {**place, "item_id": item["id"], "name": item["name"]}
            done = self._event("function_call_arguments.done", **where, arguments=item["arguments"])
        else:
            part, where = item["content"][0], {**place, **self._of_item()}
            more: Item = {"logprobs": []} if part["type"] == "output_text" else {}
            done = self._event(f"{part['type']}.done", **where, **more, text=part["text"])
            done += self._event("content_part.done", **where, part=part)
        return done + self._event("output_item.done", **place, item=item)

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1}

    def _of_item(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "content_index": 0}

    # -- the response ------------------------------------------------------------------------------

    def _status(self) -> str:
        return "incomplete" if self._finish in ("length", "abort") else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        answer, get = self._answer, self._fields.get
        is_over = status not in ("in_progress", "failed")
        results = answer.results.values()
        counts = {"timings": timings_of(results), "specrun": speculation_of(results)}
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": answer.service.settings.model,
            "output": list(self._items) if is_over else [],
            **{name: get(name) for name in _ECHOED},
            "parallel_tool_calls": get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "text": get("text") or {"format": {"type": "text"}},
            "tool_choice": get("tool_choice") or "auto",
            "tools": get("tools") or [],
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            **(counts if is_over else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._answer)
        tokenize = self._answer.service.engine.vocabulary.tokenize
        n_thought = len(tokenize(self._reasoning, add_special=False))
        drafted = usage["completion_tokens_details"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": n_thought, **drafted},
            "total_tokens": usage["total_tokens"],
        }


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
