"""/v1/messages: conversations as Anthropic's clients have them, and how many tokens one has."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.body import Fields, read_body, shown
from specrun.cli.serve.errors import RequestError, anthropic_error
from specrun.cli.serve.replies import (
    Choice,
    begin,
    event_bytes,
    json_reply,
    reply,
    speculation_of,
    usage_of,
)
from specrun.cli.serve.sampling import read_format, read_length, read_sampling, read_speculative
from specrun.cli.serve.service import Answer, AnswerRequest, AnswerService, Delta, Finish
from specrun.cli.serve.settings import Bounds
from specrun.cli.serve.tools import MOST_TOOLS, Message, Tool, ToolChoice, function_tool, plan_turn
from specrun.runtime.chat import CallBegun, Content, MoreArguments, Part, Reasoning
from specrun.runtime.round import GenerationResult

# -- Messages of Anthropic's API, made of blocks, as messages that chat templates read ------------


_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_MODEL_SAID = ("thinking", "redacted_thinking")


def read_conversation(fields: Fields, bounds: Bounds) -> list[Message]:
    """Return `system` and `messages` as OpenAI has them; raises `RequestError` by place."""
    given = fields.items("messages", bounds.messages)
    if not given:
        raise RequestError("messages is missing or empty: give at least one message", "messages")
    messages: list[Message] = []
    if "system" in fields:
        messages.append({"role": "system", "content": _text(fields.get("system"), "system")})
    for place, value in enumerate(given):
        messages += _messages(value, f"messages[{place}]", bounds)
    return messages


def _messages(value: object, where: str, bounds: Bounds) -> list[Message]:
    if not isinstance(value, dict):
        problem = f"{where} is {shown(value)}: give an object with role and content"
        raise RequestError(problem, where)
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        field = f"{where}.role"
        raise RequestError(f"{field} is {shown(role)}: give one of {', '.join(_ROLES)}", field)
    field = f"{where}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(content, field, bounds.messages)
    return _said(blocks, field) if role == "assistant" else _heard(str(role), blocks, field)


def _blocks(content: object, field: str, most: int) -> list[dict[str, Any]]:
    is_list = isinstance(content, list) and all(isinstance(block, dict) for block in content)
    if not isinstance(content, list) or not is_list:
        wanted = 'a text, or blocks as {"type": "text", "text": "..."}'
        raise RequestError(f"{field} is {shown(content)}: give {wanted}", field)
    if len(content) > most:
        raise RequestError(f"{field} has {len(content)} blocks: give at most {most}", field)
    return content


def _said(blocks: Sequence[dict[str, Any]], field: str) -> list[Message]:
    """Return what the model said: its texts, its thoughts and its calls."""
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        kind, where = block.get("type"), f"{field}[{place}]"
        if kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind not in _MODEL_SAID:
            texts.append(_text_of(block, where))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    call_id, name, given = block.get("id"), block.get("name"), block.get("input", {})
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(given, dict):
        form = '{"type": "tool_use", "id": "...", "name": "...", "input": {...}}'
        raise RequestError(f"{where} is {shown(block)}: give {form}", where)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)},
    }


def _heard(role: str, blocks: Sequence[dict[str, Any]], field: str) -> list[Message]:
    """Return what the model was told: results of tools, each a message, then texts."""
    messages: list[Message] = []
    texts: list[str] = []
    for place, block in enumerate(blocks):
        where = f"{field}[{place}]"
        if block.get("type") != "tool_result":
            texts.append(_text_of(block, where))
            continue
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise RequestError(
                f"{where}.tool_use_id is {shown(call_id)}: give the call's id", where
            )
        result = _text(block.get("content", ""), f"{where}.content")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    if texts or not messages:
        messages.append({"role": role, "content": "".join(texts)})
    return messages


def _text(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    blocks = _blocks(content, field, MOST_TOOLS)
    return "".join(_text_of(block, f"{field}[{k}]") for k, block in enumerate(blocks))


def _text_of(block: dict[str, Any], where: str) -> str:
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        kind = shown(block.get("type"))
        raise RequestError(f"{where}.type is {kind}: this model reads text", f"{where}.type")
    return text


def read_tools(fields: Fields) -> list[Tool]:
    """Return the tools in OpenAI's form; those that Anthropic's servers run are refused."""
    given = fields.items("tools", MOST_TOOLS) or []
    tools: list[Tool] = []
    for place, value in enumerate(given):
        where = f"tools[{place}]"
        if not isinstance(value, dict):
            raise RequestError(f"{where} is {shown(value)}: give a tool with a name", where)
        if value.get("type") not in (None, "custom"):
            field = f"{where}.type"
            problem = f"{field} is {shown(value['type'])}: this server runs no tools itself"
            raise RequestError(f"{problem}, give those that you run", field)
        tools.append(function_tool(value, where, "input_schema"))
    return tools


def read_choice(fields: Fields) -> tuple[ToolChoice, bool]:
    """Return `tool_choice`, and whether several calls may come at once."""
    choice = fields.fields("tool_choice")
    if choice is None:
        return ToolChoice(), True
    kind, parallel = choice.text("type"), not choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        name = choice.text("name")
        if name is None:
            raise choice.wrong("name", "the name of a tool")
        return ToolChoice("required", frozenset([name])), parallel
    if kind not in _CHOICES:
        raise choice.wrong("type", "auto, any, tool or none")
    return ToolChoice(_CHOICES[kind]), parallel


# -- Messages as Anthropic writes them: blocks of text, thinking and tool use, whole or as events -


Block = dict[str, Any]


class MessageForm:
    """A message, whole or as named events: each block begins, grows and ends before the next."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks = 0
        self._open: type[Content] | type[Reasoning] | type[CallBegun] | None = None
        self._last: tuple[GenerationResult, Finish] | None = None

    def _message(self, content: Sequence[Block], reason: str | None, stop: str | None) -> Block:
        return {
            "id": f"msg_{self._answer.id}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.service.settings.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(),
        }

    # -- whole -------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the message."""
        (choice,) = choices
        reply = choice.reply
        content: list[Block] = []
        if reply.reasoning:
            content.append(_thinking(reply.reasoning))
        if reply.content or not reply.calls:
            content.append({"type": "text", "text": reply.content})
        content += [_tool_use(call.name, _as_object(call.arguments)) for call in reply.calls]
        reason, stop = self._ending(choice.result, choice.finish)
        message = self._message(content, reason, stop)
        return {**message, "specrun": speculation_of(self._answer.results.values())}

    # -- as events ---------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the event that begins the message."""
        return _event("message_start", message=self._message([], None, None))

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a round's parts."""
        if delta.result is not None and delta.finish is not None:
            self._last = delta.result, delta.finish
        return b"".join([self._part(part) for part in delta.parts])

    def end(self) -> bytes:
        """Return the events that end the last block and the message."""
        empty = b"" if self._blocks else self._part(Content(""))
        assert self._last is not None  # the service tells how every choice ended
        reason, stop = self._ending(*self._last)
        return (
            empty
            + self._close()
            + _event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": stop},
                usage=self._usage(),
                specrun=speculation_of(self._answer.results.values()),
            )
            + _event("message_stop")
        )

    def failed(self, error: RequestError) -> bytes:
        """Return the error object as an event."""
        return event_bytes(anthropic_error(error), "error")

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            return self._begin_block(CallBegun, _tool_use(part.name, {}))
        if isinstance(part, MoreArguments):
            return self._grow({"type": "input_json_delta", "partial_json": part.text})
        if isinstance(part, Reasoning):
            begun = b"" if self._open is Reasoning else self._begin_block(Reasoning, _thinking(""))
            return begun + self._grow({"type": "thinking_delta", "thinking": part.text})
        empty = {"type": "text", "text": ""}
        begun = b"" if self._open is Content else self._begin_block(Content, empty)
        return begun + self._grow({"type": "text_delta", "text": part.text})

    def _begin_block(
        self, kind: type[Content] | type[Reasoning] | type[CallBegun], block: Block
    ) -> bytes:
        closed = self._close()
        self._open = kind
        self._blocks += 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _grow(self, delta: Block) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._blocks - 1)

    # -- what both have ----------------------------------------------------------------------------

    def _ending(self, result: GenerationResult, finish: Finish) -> tuple[str, str | None]:
        """Return Anthropic's reason of the end, and the stop sequence that came."""
        if finish == "tool_calls":
            return "tool_use", None
        if finish == "abort":  # it may be sent back, and goes on
            return "pause_turn", None
        if finish == "length":
            most = self._answer.request.max_tokens
            is_most = most is not None and result.usage.completion_tokens >= most
            return "max_tokens" if is_most else "model_context_window_exceeded", None
        stop = self._stop_sequence(result)
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    def _stop_sequence(self, result: GenerationResult) -> str | None:
        """Return the stop sequence that ended the answer: its tokens have it, its text has not."""
        vocabulary = self._answer.service.engine.vocabulary
        said = result.token_ids
        if not said or said[-1] in vocabulary.end_of_generation:
            return None
        rest = vocabulary.detokenize(said)[len(result.text) :]
        return next((stop for stop in self._answer.request.params.stop if stop in rest), None)

    def _usage(self) -> dict[str, int]:
        usage = usage_of(self._answer)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _thinking(text: str) -> Block:
    # Signed are thoughts that only their server may read: these are anyone's.
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(name: str, given: object) -> Block:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": name,
        "input": given,
    }


def _as_object(arguments: str) -> object:
    """Return the arguments of a call; {} for one that was cut short."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: object) -> bytes:
    return event_bytes({"type": kind, **fields}, kind)


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
