"""Messages of Anthropic's API, made of blocks, as messages that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specrun.cli.serve.body import Fields, shown
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.settings import Bounds
from specrun.cli.serve.tools.fields import MOST_TOOLS, Tool, ToolChoice, function_tool
from specrun.cli.serve.tools.history import Message

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
