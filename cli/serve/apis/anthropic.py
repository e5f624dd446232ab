"""Anthropic's API: /v1/messages, conversations made of blocks, and how many tokens one has."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from specrun.cli.serve.body import checked, one_of, wanted
from specrun.cli.serve.errors import RequestError, anthropic_error
from specrun.cli.serve.figures import speculation_of, usage_of
from specrun.cli.serve.replies import ItemForm, answering, counting, event_bytes
from specrun.cli.serve.sampling import (
    AnswerBody,
    FormatHolder,
    Texts,
    answer_request,
    with_settings,
)
from specrun.cli.serve.service import AnswerRequest, AnswerService
from specrun.cli.serve.tools import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Function,
    Message,
    ReasoningFormat,
    Schema,
    ToolChoice,
    call_of,
    first_new,
    offered,
    plan_turn,
    text_of,
)
from specrun.runtime.chat import CallBegun, Part, Reasoning

# -- Requests -------------------------------------------------------------------------------------

_MODES = {"auto": "auto", "none": "none", "any": "required"}
_BLOCKS = 'a text, or blocks as {"type": "text", "text": "..."}'
_CALL = '{"type": "tool_use", "id": "...", "name": "...", "input": {...}}'
_Role = Literal["user", "assistant", "system"]
_Choice = Literal["auto", "any", "tool", "none"]
_ListOfBlocks = Annotated[list[dict[str, Any]], Meta(max_length=MOST_MESSAGES)]
Blocks = Annotated[str | _ListOfBlocks, wanted(_BLOCKS, whole=True)]


class BlockMessage(Struct):
    """A message of a text, or of blocks."""

    role: Annotated[_Role, one_of(_Role)]
    content: Blocks


class InputTool(Function):
    """A tool that a model may call."""

    parameters: Schema = field(default=None, name="input_schema")


class ToolChoiceFields(Struct):
    """Anthropic's `tool_choice`."""

    type: Annotated[_Choice, wanted("auto, any, tool or none")]
    name: Annotated[str | None, wanted("the name of a tool")] = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(FormatHolder):
    """Anthropic's `output_config`: how much is thought, and the form of the answer."""

    effort: Any = None


_Message = Annotated[BlockMessage, wanted("an object with role and content")]
_Messages = Annotated[list[_Message], Meta(max_length=MOST_MESSAGES)]
_Tool = Annotated[dict[str, Any], wanted("a tool with a name")]
_Tools = Annotated[list[_Tool], Meta(max_length=MOST_TOOLS)]


@with_settings
class MessageBody(AnswerBody, kw_only=True):
    """The body of a message."""

    messages: _Messages | None = None
    system: Annotated[str | _ListOfBlocks | None, wanted(_BLOCKS, whole=True)] = None
    tools: _Tools | None = None
    tool_choice: ToolChoiceFields | None = None
    stop: Texts = field(default=None, name="stop_sequences")
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    reasoning_format: Annotated[ReasoningFormat | None, one_of(ReasoningFormat)] = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ToolUse(Struct):
    """A block that is a call."""

    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResult(Struct):
    """A block that is the result of a call."""

    tool_use_id: Annotated[str, wanted("the call's id")]
    content: Blocks | None = None


def message_request(body: MessageBody, service: AnswerService) -> AnswerRequest:
    """Return the request of a body; raises `RequestError` that names the field."""
    conversation = _conversation(body)
    if conversation[-1].get("tool_calls"):
        raise RequestError("messages ends with calls: give their results", "messages")
    offer = offered(body.tools, InputTool)
    given = body.tool_choice or ToolChoiceFields("auto")
    if given.type != "tool":
        choice = ToolChoice(_MODES[given.type])
    elif given.name is None:
        raise RequestError("tool_choice.name is None: give the name of a tool", "tool_choice.name")
    else:
        choice = ToolChoice("required", frozenset([given.name]))
    config = body.output_config or OutputConfig()
    turn = plan_turn(
        service.engine,
        body,
        conversation,
        offer,
        choice,
        parallel=not given.disable_parallel_tool_use,
        level=config.effort,
        level_field="output_config.effort",
    )
    return answer_request(
        body,
        service,
        turn=turn,
        form=config.format,
        form_field="output_config.format",
    )


def _conversation(body: MessageBody) -> list[Message]:
    """Return `system` and `messages` as OpenAI has them; raises `RequestError` by place."""
    if not body.messages:
        raise RequestError("messages is missing or empty: give at least one message", "messages")
    messages: list[Message] = []
    if body.system is not None:
        messages.append({"role": "system", "content": text_of(body.system, "system", _BLOCKS)})
    new = first_new([message.role for message in body.messages])
    for place, message in enumerate(body.messages):
        role, content, field = message.role, message.content, f"messages[{place}].content"
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_answered(content, field))
        else:
            messages += _asked(role, content, field, is_new=place >= new)
    return messages


def _answered(blocks: Sequence[dict[str, Any]], field: str) -> Message:
    """Return a message of the model: its texts, its thoughts and its calls."""
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        kind, where = block.get("type"), f"{field}[{place}]"
        if kind == "tool_use":
            call = checked(block, ToolUse, where, _CALL)
            calls.append(call_of(call.id, call.name, call.input, f"{where}.input"))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        else:
            texts.append(block)
    message: Message = {"role": "assistant", "content": text_of(texts, field, _BLOCKS)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(
    role: str, blocks: Sequence[dict[str, Any]], field: str, *, is_new: bool
) -> list[Message]:
    """Return messages to the model: results of tools, each a message, then texts."""
    messages: list[Message] = []
    texts: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        where = f"{field}[{place}]"
        if block.get("type") != "tool_result":
            text_of([block], where, _BLOCKS, is_new=is_new and role == "user")
            texts.append(block)
            continue
        result = checked(block, ToolResult, where)
        content = text_of(result.content or "", f"{where}.content", _BLOCKS)
        messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": content})
    if texts or not messages:
        messages.append({"role": role, "content": text_of(texts, field, _BLOCKS)})
    return messages


# -- Replies --------------------------------------------------------------------------------------

Block = dict[str, Any]


class MessageForm(ItemForm):
    """A message, whole or as named events; its items are blocks."""

    def begin(self) -> bytes:
        """Return the event that begins the message."""
        return _event("message_start", message=self._message([], None, None))

    def end(self) -> bytes:
        """Return the events that end the last block and the message."""
        ended = super().end()
        reason, stop = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        more = {"usage": self._usage(), "specrun": speculation_of(self._answer)}
        return ended + _event("message_delta", delta=delta, **more) + _event("message_stop")

    @classmethod
    def refused(cls, error: RequestError) -> bytes:
        """Return the error object as an event."""
        return event_bytes(anthropic_error(error), "error")

    def _object(self) -> object:
        message = self._message(self._items, *self._stop_reason())
        return {**message, "specrun": speculation_of(self._answer)}

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

    def _begin_item(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            call_id = f"toolu_{secrets.token_hex(12)}"
            block: Block = {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}
            self._arguments = ""
        elif isinstance(part, Reasoning):
            # Signed are thoughts that only their server may read: these are anyone's.
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._items.append(block)
        return _event("content_block_start", index=len(self._items) - 1, content_block=block)

    def _grow_item(self, text: str) -> bytes:
        block = self._items[-1]
        if block["type"] == "tool_use":
            self._arguments += text
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            name = block["type"]  # of the field, too
            block[name] += text
            delta = {"type": f"{name}_delta", name: text}
        return _event("content_block_delta", index=len(self._items) - 1, delta=delta)

    def _end_item(self) -> bytes:
        if self._items[-1]["type"] == "tool_use":
            try:
                value = json.loads(self._arguments)
            except (ValueError, RecursionError):  # of a call that was cut short
                value = {}
            self._items[-1]["input"] = value if isinstance(value, dict) else {}
        return _event("content_block_stop", index=len(self._items) - 1)

    def _stop_reason(self) -> tuple[str, str | None]:
        """Return Anthropic's reason of the end, and the stop sequence that came."""
        assert self._ending is not None  # the service ends every choice with a result
        result, finish = self._ending
        if finish == "tool_calls":
            return "tool_use", None
        if finish == "abort":  # it may be sent back, and goes on
            return "pause_turn", None
        if finish == "length":
            most = self._answer.request.max_tokens
            is_most = most is not None and result.usage.completion_tokens >= most
            return "max_tokens" if is_most else "model_context_window_exceeded", None
        vocabulary, tokens = self._answer.service.engine.vocabulary, result.token_ids
        if tokens and tokens[-1] not in vocabulary.end_of_generation:
            # A stop sequence that ended the answer is in its tokens, and not in its text.
            rest = vocabulary.detokenize(tokens)[len(result.text) :]
            for stop in self._answer.request.params.stop:
                if stop in rest:
                    return "stop_sequence", stop
        return "end_turn", None

    def _usage(self) -> dict[str, int]:
        usage = usage_of(self._answer)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _event(kind: str, **fields: object) -> bytes:
    return event_bytes({"type": kind, **fields}, kind)


messages = answering(MessageBody, message_request, MessageForm)
count_tokens = counting(MessageBody, message_request)
