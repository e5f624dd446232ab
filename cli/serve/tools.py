"""Conversations with tools and reasoning: history, tools, and turns.

All APIs' conversations become OpenAI's form, which chat templates read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from specrun.bindings.errors import TemplateError
from specrun.cli.serve.body import shown, wanted
from specrun.cli.serve.errors import RequestError
from specrun.runtime.chat import (
    ChatTurn,
    Effort,
    Thoughts,
    arguments_of,
    is_malformed,
    is_unreadable,
    joined,
    turn_of,
)
from specrun.runtime.engine import Engine

Message = dict[str, Any]
Tool = dict[str, Any]
MOST_MESSAGES = 4096
MOST_TOOLS = 512

# -- History --------------------------------------------------------------------------------------


def text_of(content: object, field: str, asked: str, *, is_new: bool = False) -> str:
    """Return a content as a text: parts that a text model cannot read are told in words.

    `is_new`: it is what the user asks now, and has to be read.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{field} is {shown(content)}: give {asked}", field)
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        own = {"type": "text", "text": part} if isinstance(part, str) else part
        if not isinstance(own, dict) or is_malformed(own) or (is_new and is_unreadable(own)):
            where = f"{field}[{place}]"
            kind = own.get("type") if isinstance(own, dict) else own
            problem = f"{where} is {shown(kind)}, this model reads text"
            raise RequestError(f"{problem}: give {asked}", where)
        parts.append(own)
    return joined(parts)


def first_new(roles: Sequence[str]) -> int:
    """Return the place of the first message behind the last one of the assistant."""
    behind = (place for place, role in enumerate(roles, 1) if role == "assistant")
    return max(behind, default=0)


def call_of(call_id: object, name: str, arguments: object, field: str) -> Message:
    """Return a call of the history, with its arguments as an object."""
    arguments = arguments_of(arguments)
    if not isinstance(arguments, dict):
        raise RequestError(f"{field} is {shown(arguments)}: give a JSON object as a text", field)
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


# -- Tools ----------------------------------------------------------------------------------------


Schema = Annotated[dict[str, Any] | None, wanted("a JSON schema")]


class Function(Struct):
    """A function that a model may call."""

    name: Annotated[
        str,
        Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,128}\Z"),
        wanted("1 to 128 letters, digits, '_', '-' or '.'"),
    ]
    description: str | None = None
    parameters: Schema = None
    strict: Any = None

    def tool(self) -> Tool:
        """Return it in OpenAI's form, with the fields that clients may leave out."""
        function: Tool = {"name": self.name, "description": self.description or ""}
        if self.strict is True:
            function["strict"] = True
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called: "auto", "none" or "required"; `names` are those that may be."""

    mode: str = "auto"
    names: frozenset[str] | None = None


def tool_choice_of(given: object) -> ToolChoice:
    """Return the choice that OpenAI's `tool_choice` makes."""
    if given is None:
        return ToolChoice()
    if given in ("auto", "none", "required"):
        return ToolChoice(str(given))
    if _type_of(given).startswith(_HOSTED):
        return ToolChoice()  # of a tool that another server runs
    allowed = _inner(given, "allowed_tools")
    name = _name_of(given)
    if allowed.get("type", "allowed_tools") == "allowed_tools" and "tools" in allowed:
        mode, tools = allowed.get("mode", "auto"), allowed["tools"]
        listed = tools if isinstance(tools, list) else [None]
        called = [tool for tool in listed if _type_of(tool) in _CALLED]
        found = [_name_of(tool) for tool in called]
        names = [each for each in found if isinstance(each, str)]
        if mode in ("auto", "required") and len(names) == len(found):
            return ToolChoice(mode, frozenset(names))
    elif isinstance(name, str):
        return ToolChoice("required", frozenset([name]))
    form = '{"type": "function", "function": {"name": "..."}}'
    problem = f"tool_choice is {shown(given)}: give auto, none, required, or {form}"
    raise RequestError(problem, "tool_choice")


_CALLED = ("function", "custom", "allowed_tools")
"""The types of tools that clients run themselves, and of lists of them."""


_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer"),
    *("local_shell", "shell", "apply_patch", "tool_search"),
)
"""How the types of tools begin that servers run."""


def _type_of(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) else "function"


def _name_of(tool: object) -> object:
    """Return the name of a function or of a custom tool."""
    return _inner(tool, "function").get("name") or _inner(tool, "custom").get("name")


def _inner(value: object, name: str) -> Mapping[str, Any]:
    """Return the object in a field; the newer API has its fields beside the type instead."""
    if not isinstance(value, dict):
        return {}
    inner = value.get(name, value)
    return inner if isinstance(inner, dict) else {}


# -- Turns ----------------------------------------------------------------------------------------


# Claude Code writes one before the system's text, for its maker's bills; its hash changes with
# every request, so that nothing behind it would be found in the cache.
_CHANGING_LINE = re.compile(
    r"^x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\n]*(?:;|$))*\n*", re.MULTILINE
)


def _constant(message: Message) -> Message:
    """Return a system message without lines that are no text for the model and always change."""
    content = message["content"]
    if message["role"] != "system" or not isinstance(content, str):
        return message
    return {**message, "content": _CHANGING_LINE.sub("", content)}


def plan_turn(
    engine: Engine,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    thoughts: Thoughts = "apart",
    template_kwargs: Mapping[str, Any],
    effort: Effort | None = None,
    custom: Collection[str] = (),
    is_begun: bool = False,
    is_asked: bool = True,
) -> ChatTurn:
    """Return how a conversation is rendered and its reply read; raises `RequestError`."""
    messages = [_constant(message) for message in messages]
    if choice.mode == "required" and not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    used = tools if choice.mode != "none" else ()
    try:
        template = engine.tool_template if used else engine.chat_template
    except TemplateError:  # rendering refuses it, too
        if used:
            problem = "tools need a chat template, and this model has none"
            raise RequestError(problem, "tools") from None
        return ChatTurn(messages, (), template_kwargs, is_begun=is_begun, is_asked=is_asked)
    known = {tool["function"]["name"] for tool in used}
    for name in choice.names or ():
        if name not in known:
            problem = f"tool_choice names {name!r}, which is not among the tools"
            raise RequestError(problem, "tool_choice")
    return turn_of(
        template,
        messages,
        used,
        names=choice.names,
        must_call=choice.mode == "required",
        most_calls=None if parallel else 1,
        custom=custom,
        thoughts=thoughts,
        template_kwargs=template_kwargs,
        effort=effort,
        is_begun=is_begun,
        is_asked=is_asked,
    )
