"""Messages of chat requests, their contents as text, and those of replies, whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.cli.serve.body import Fields, shown
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.settings import Bounds
from specrun.cli.serve.tools.plan import ReplyPlan
from specrun.runtime.chat import CallBegun, Content, Part, Reasoning, Reply

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
