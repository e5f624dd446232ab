"""Conversations with tools and reasoning: history, tools, and turns.

All APIs' conversations become OpenAI's form, which chat templates read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from specrun.bindings.errors import OptionError, TemplateError
from specrun.cli.serve.body import shown, wanted
from specrun.cli.serve.errors import RequestError
from specrun.runtime.chat import (
    ChatTurn,
    Effort,
    Thoughts,
    ToolChoice,
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


def tool_choice_of(given: object) -> ToolChoice:
    """Return the choice that OpenAI's `tool_choice` makes; raises `RequestError`."""
    try:
        return ToolChoice.of(given)
    except OptionError as error:
        raise RequestError(str(error), "tool_choice") from None


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
    try:
        used = choice.used(tools)
    except OptionError as error:
        raise RequestError(str(error), "tool_choice") from None
    try:
        template = engine.tool_template if used else engine.chat_template
    except TemplateError:  # rendering refuses it, too
        if used:
            problem = "tools need a chat template, and this model has none"
            raise RequestError(problem, "tools") from None
        return ChatTurn(messages, (), template_kwargs, is_begun=is_begun, is_asked=is_asked)
    return turn_of(
        template,
        messages,
        used,
        names=choice.names,
        must_call=choice.must_call,
        most_calls=None if parallel else 1,
        custom=custom,
        thoughts=thoughts,
        template_kwargs=template_kwargs,
        effort=effort,
        is_begun=is_begun,
        is_asked=is_asked,
    )
