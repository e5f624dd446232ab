"""OpenAI's newer API: /v1/responses, which answers an input by items; nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from specrun.cli.serve.body import checked, one_of, wanted, wrong
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.figures import speculation_of, timings_of, usage_of
from specrun.cli.serve.replies import ItemForm, answering, counting, event_bytes
from specrun.cli.serve.sampling import (
    AnswerBody,
    FormatHolder,
    Length,
    answer_request,
    with_settings,
)
from specrun.cli.serve.service import AnswerRequest, AnswerService, ServedAnswer
from specrun.cli.serve.tools import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Message,
    ReasoningFormat,
    call_of,
    input_arguments,
    offered,
    plan_turn,
    text_of,
    tool_choice_of,
)
from specrun.runtime.chat import CallBegun, Part, Reasoning, part_text

# -- Requests --------------------------------------------------------------------------------------

_PARTS = 'a text, or parts as {"type": "input_text", "text": "..."}'
_CALL = '{"type": "function_call", "call_id": "...", "name": "...", "arguments": "{}"}'
_ITEMS = "a text, or a list of items"
_ASKING = ("user", "system", "developer")
_ASKED = ("action", "operation", "input", "arguments")
_Role = Literal["system", "developer", "user", "assistant"]
_Item = Annotated[dict[str, Any], wanted("an object")]
_Items = Annotated[list[_Item], Meta(max_length=MOST_MESSAGES)]
_Tool = Annotated[dict[str, Any], wanted("a tool")]
_Tools = Annotated[list[_Tool], Meta(max_length=MOST_TOOLS)]


@with_settings
class ResponseBody(AnswerBody, kw_only=True):
    """The body of a response; fields that the response repeats are as they were given."""

    input: Annotated[str | _Items | None, wanted(_ITEMS)] = None
    instructions: str | None = None
    max_output_tokens: Length | None = None
    tools: _Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Annotated[ReasoningFormat | None, one_of(ReasoningFormat)] = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    metadata: Any = None
    user: Any = None


class MessageItem(Struct):
    """An item that is a message."""

    role: Annotated[_Role, one_of(_Role)]
    content: Any = None


class CallItem(Struct):
    """An item that is a call."""

    call_id: str
    name: str
    arguments: str = "{}"


class InputItem(Struct):
    """An item that is a call of a custom tool."""

    call_id: str
    name: str
    input: str = ""


class OutputItem(Struct):
    """An item that is the result of a call."""

    output: Any = None


def response_request(body: ResponseBody, service: AnswerService) -> AnswerRequest:
    """Return the request of a body; raises `RequestError` that names the field."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name}: this server stores no responses, send the input", name)
    if body.background:
        raise RequestError("background: this server answers at once, leave it out", "background")
    conversation, offer = _conversation(body), offered(body.tools)
    turn = plan_turn(
        service.engine,
        body,
        conversation,
        offer,
        tool_choice_of(body.tool_choice),
        parallel=body.parallel_tool_calls is not False,
    )
    form = checked(body.text or {}, FormatHolder, "text").format
    return answer_request(
        body,
        service,
        turn=turn,
        max_tokens=body.max_output_tokens,
        form=form,
        form_field="text.format",
    )


def _conversation(body: ResponseBody) -> list[Message]:
    """Return `instructions` and `input` as messages; raises `RequestError` by place."""
    reader = _ItemReader()
    if body.instructions is not None:
        reader.messages.append({"role": "system", "content": body.instructions})
    if body.input is None:
        raise wrong("input", body.input, _ITEMS)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    asked = [item.get("role") in _ASKING for item in items]
    new = max((place for place, own in enumerate(asked, 1) if not own), default=0)
    for place, item in enumerate(items):
        reader.read(item, f"input[{place}]", is_new=place >= new)
    # A client that sends no question yet warms the cache.
    return _one_beginning(reader.messages or [{"role": "user", "content": ""}])


class _ItemReader:
    """Makes messages of items: all items of the model up to the next result or question are one."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts = ""  # of the call or the message that follows

    def read(self, item: dict[str, Any], where: str, *, is_new: bool) -> None:
        """Add an item; raises `RequestError` that names its field."""
        kind = str(item.get("type") or "message")
        if kind == "message":
            self._read_message(item, where, is_new=is_new)
        elif kind == "reasoning":  # without its content if its server keeps that
            content = item.get("content") or item.get("summary") or []
            self._thoughts += text_of(content, f"{where}.content", _PARTS)
        elif kind == "function_call":
            call = checked(item, CallItem, where, _CALL)
            self._call(call.call_id, call.name, call.arguments, f"{where}.arguments")
        elif kind == "custom_tool_call":
            text = checked(item, InputItem, where)
            self._call(text.call_id, text.name, input_arguments(text.input), f"{where}.input")
        elif kind.endswith("_output"):
            self._read_output(item, kind, where)
        else:
            self._read_other(item, kind)

    def _read_message(self, item: dict[str, Any], where: str, *, is_new: bool) -> None:
        message = checked(item, MessageItem, where)
        is_asked = is_new and message.role == "user"
        text = text_of(message.content, f"{where}.content", _PARTS, is_new=is_asked)
        if message.role != "assistant":
            role = "system" if message.role == "developer" else message.role
            self.messages.append({"role": role, "content": text})
            self._thoughts = ""
        elif self._is_told():  # its calls come before its text
            self.messages[-1]["content"] += f"\n{text}"
        else:
            self.messages.append({"role": "assistant", "content": text})
            self._think()

    def _read_output(self, item: dict[str, Any], kind: str, where: str) -> None:
        """Add the result of a call, in words if templates have no such call."""
        output = checked(item, OutputItem, where).output
        call_id = item.get("call_id") or item.get("id")
        if not isinstance(call_id, str):
            raise wrong(f"{where}.call_id", call_id, "the call's id")
        if output is None:  # of a tool that reports whether it was done
            output = str(item.get("status") or "")
        if isinstance(output, dict):
            output = [output]
        elif isinstance(output, list) and not all("type" in each for each in output):
            output = [{"type": kind.removesuffix("_output"), "output": output}]
        text = text_of(output, f"{where}.output", _PARTS)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _read_other(self, item: dict[str, Any], kind: str) -> None:
        """Add the result of another server's tool; a call that its client ran is a call."""
        asked = next((item[name] for name in _ASKED if isinstance(item.get(name), dict)), None)
        if isinstance(item.get("call_id"), str) and asked is not None:
            self._call(item["call_id"], kind.removesuffix("_call"), asked, kind)
            return
        message, text = self._answer(), part_text({**item, "type": kind})
        message["content"] = f"{message['content']}\n{text}".lstrip("\n")

    def _call(self, call_id: str, name: str, arguments: object, field: str) -> None:
        made = call_of(call_id, name, arguments, field)
        self._answer().setdefault("tool_calls", []).append(made)

    def _is_told(self) -> bool:
        """Whether the last message is the assistant's, and has only words about its calls."""
        last = self.messages[-1] if self.messages else {}
        is_answer = last.get("role") == "assistant" and "tool_calls" not in last
        return is_answer and str(last.get("content")).startswith("[")

    def _answer(self) -> Message:
        """Return the assistant's message that is being made."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        self._think()
        return self.messages[-1]

    def _think(self) -> None:
        if self._thoughts:
            self.messages[-1]["reasoning_content"], self._thoughts = self._thoughts, ""


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


# -- Replies ---------------------------------------------------------------------------------------

Item = dict[str, Any]
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user")
"""Fields of a request that a response repeats."""


_CALLS = (("function_call", "fc", "arguments"), ("custom_tool_call", "ctc", "input"))
_TEXTS_OF_CALLS = {kind: text for kind, _, text in _CALLS}
"""The items that are calls, and the fields of their arguments."""


class ResponseForm(ItemForm):
    """A response, whole or as numbered events."""

    def __init__(self, answer: ServedAnswer, body: ResponseBody) -> None:
        super().__init__(answer, body)
        self._body = body
        self._number = 0
        self._namespaces = offered(body.tools).namespaces

    def begin(self) -> bytes:
        """Return the events that begin the response."""
        response = self._response("in_progress")
        created = self._event("created", response=response)
        return created + self._event("in_progress", response=response)

    def end(self) -> bytes:
        """Return the events that end the last item and the response."""
        ended, status = super().end(), self._status()
        return ended + self._event(status, response=self._response(status))

    @classmethod
    def refused(cls, error: RequestError) -> bytes:
        """Return the event of a response that does not begin."""
        told = {"code": error.code, "message": str(error), "param": error.param}
        return event_bytes({"type": "error", **told, "sequence_number": 0}, "error")

    def failed(self, error: RequestError) -> bytes:
        """Return the event of a response that failed."""
        problem = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._response("failed"), "error": problem}
        return self._event("failed", response=response)

    def _object(self) -> object:
        return self._response(self._status())

    def _event(self, kind: str, **fields: object) -> bytes:
        kind = f"response.{kind}"
        payload = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event_bytes(payload, kind)

    # -- items -------------------------------------------------------------------------------------

    def _begin_item(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            plan, space = self._answer.request.turn.plan, self._namespaces.get(part.name)
            kind, prefix, given = _CALLS[part.name in plan.custom]
            fields: Item = {"call_id": plan.new_id(), "name": part.name, given: ""}
            more: Item = {} if space is None else {"namespace": space}
            return self._add_item(kind, prefix, **fields, **more)
        if isinstance(part, Reasoning):
            added = self._add_item("reasoning", "rs", summary=[], content=[])
            text: Item = {"type": "reasoning_text", "text": ""}
        else:
            added = self._add_item("message", "msg", role="assistant", content=[])
            text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(text)
        where = self._of_item()
        return added + self._event("content_part.added", **where, content_index=0, part=text)

    def _add_item(self, kind: str, prefix: str, **fields: object) -> bytes:
        item_id = f"{prefix}_{self._answer.id}{len(self._items)}"
        self._items.append({"type": kind, "id": item_id, **fields, "status": "in_progress"})
        place = len(self._items) - 1
        return self._event("output_item.added", output_index=place, item=self._items[-1])

    def _grow_item(self, text: str) -> bytes:
        item, where = self._items[-1], self._of_item()
        if item["type"] in _TEXTS_OF_CALLS:
            name = _TEXTS_OF_CALLS[item["type"]]
            item[name] += text
            return self._event(f"{item['type']}_{name}.delta", **where, delta=text)
        part = item["content"][0]
        part["text"] += text
        where["content_index"] = 0
        if part["type"] == "output_text":
            where["logprobs"] = []
        return self._event(f"{part['type']}.delta", **where, delta=text)

    def _end_item(self) -> bytes:
        item, where = self._items[-1], self._of_item()
        item["status"] = self._status()
        if item["type"] in _TEXTS_OF_CALLS:
            name = _TEXTS_OF_CALLS[item["type"]]
            call = {"name": item["name"], name: item[name]}
            done = self._event(f"{item['type']}_{name}.done", **where, **call)
        else:
            part, where["content_index"] = item["content"][0], 0
            more: Item = {"logprobs": []} if part["type"] == "output_text" else {}
            done = self._event(f"{part['type']}.done", **where, **more, text=part["text"])
            done += self._event("content_part.done", **where, part=part)
        place = where["output_index"]
        return done + self._event("output_item.done", output_index=place, item=item)

    def _of_item(self) -> dict[str, Any]:
        """Return the fields of an event about the last item."""
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"]}

    # -- the response ------------------------------------------------------------------------------

    def _status(self) -> str:
        """Return how the response ended; an item that is not the last one is completed."""
        is_cut = self._ending is not None and self._ending.finish in ("length", "abort")
        return "incomplete" if is_cut else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        answer, body = self._answer, self._body
        is_over = status not in ("in_progress", "failed")
        counts = {"timings": timings_of(answer), "specrun": speculation_of(answer)}
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
            **{name: getattr(body, name) for name in _ECHOED},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            **(counts if is_over else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._answer)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


responses = answering(ResponseBody, response_request, ResponseForm)
input_tokens = counting(ResponseBody, response_request, object="response.input_tokens")
