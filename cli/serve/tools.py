"""Conversations with tools and reasoning: history, tools, turns, and the wish to think.

All APIs' conversations become OpenAI's form, which chat templates read.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from specrun.bindings.errors import OptionError, TemplateError
from specrun.cli.serve.body import checked, one_of, shown, wanted, wrong
from specrun.cli.serve.errors import RequestError
from specrun.runtime.chat import (
    LEVELS,
    CallBegun,
    ChatTurn,
    Effort,
    MoreArguments,
    Part,
    Thoughts,
    ToolChoice,
    arguments_of,
    is_begun_answer,
    is_malformed,
    is_unreadable,
    joined,
    turn_of,
)
from specrun.runtime.engine import Engine

_log = logging.getLogger(__name__)
Message = dict[str, Any]
Tool = dict[str, Any]
MOST_MESSAGES = 4096
MOST_TOOLS = 512

# -- History ---------------------------------------------------------------------------------------


def text_of(content: object, field: str, asked: str, *, is_new: bool = False) -> str:
    """Return a content as a text: parts that a text model cannot read are described in words.

    `is_new`: it is the user's present question, and has to be read.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(field, content, asked)
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
        raise wrong(field, arguments, "a JSON object as a text")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


# -- Tools -----------------------------------------------------------------------------------------


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


# -- Turns -----------------------------------------------------------------------------------------


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


class ReasoningBody(Protocol):
    """A body by its fields about reasoning; some have `reasoning` or `thinking`, too."""

    reasoning_format: ReasoningFormat | None
    include_reasoning: bool | None
    chat_template_kwargs: dict[str, Any] | None


def plan_turn(
    engine: Engine,
    body: ReasoningBody,
    messages: Sequence[Message],
    offer: Offer,
    choice: ToolChoice,
    *,
    parallel: bool,
    level: object = None,
    level_field: str = "reasoning_effort",
    is_begun: bool | None = None,
    is_asked: bool = True,
) -> ChatTurn:
    """Return how a conversation is rendered and its reply read; raises `RequestError`.

    `level` is how much is thought, `is_begun` None: the last message goes on if it is an answer.
    """
    messages = [_constant(message) for message in messages]
    is_begun = is_begun_answer(messages) if is_begun is None else is_begun
    effort, kwargs = _effort(body, level, level_field), body.chat_template_kwargs or {}
    try:
        used = choice.used(offer.tools)
    except OptionError as error:
        raise RequestError(str(error), "tool_choice") from None
    try:
        template = engine.tool_template if used else engine.chat_template
    except TemplateError:  # rendering refuses it, too
        if used:
            problem = "tools need a chat template, and this model has none"
            raise RequestError(problem, "tools") from None
        return ChatTurn(messages, (), kwargs, is_begun=is_begun, is_asked=is_asked)
    return turn_of(
        template,
        messages,
        used,
        choice=choice,
        most_calls=None if parallel else 1,
        custom=offer.custom,
        thoughts=_thoughts(body),
        template_kwargs=kwargs,
        effort=effort,
        is_begun=is_begun,
        is_asked=is_asked,
    )


# -- Offers: functions, custom tools, and tools that other servers would run -----------------------
#
# A custom tool takes a text. Models have functions only: it is offered as one with a single text,
# and its calls are handed out in their own form. Tools that other servers run (web search, shells,
# image generation) are passed over, with a line in the log.

_INPUT = "input"
"""The name of a custom tool's text among the arguments of its function."""


class ChatTool(Struct):
    """A tool in the form of chat completions."""

    function: Annotated[Function, wanted('a function, as {"name": "...", "parameters": {...}}')]


class CustomTool(Function):
    """A tool that takes a text, in the form that `format` describes."""

    format: Any = None


@dataclass(slots=True)
class Offer:
    """The tools of a request in OpenAI's form; `custom` are the names of those that take a text.

    `namespaces` are those of functions that a client has grouped, by their names.
    """

    tools: list[Tool] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    namespaces: dict[str, str] = field(default_factory=dict)

    def add(self, value: dict[str, Any], where: str, function: type[Function] = Function) -> None:
        """Add a tool, or pass it over; `function` is the form of functions beside the type.

        Raises `RequestError` that names the field.
        """
        kind, inner = value.get("type"), value.get("custom")
        if kind == "custom" and function is Function:
            given = (inner, f"{where}.custom") if isinstance(inner, dict) else (value, where)
            self._add_custom(checked(given[0], CustomTool, given[1]))
        elif kind in ("function", "custom", None):
            is_inner = "function" in value or "name" not in value
            if is_inner and function is Function:
                self.tools.append(checked(value, ChatTool, where).function.tool())
            else:
                self.tools.append(checked(value, function, where).tool())
        elif kind == "namespace" and isinstance(value.get("tools"), list):
            self._add_namespace(value, where)
        else:
            _pass_over(str(kind))

    def _add_custom(self, tool: CustomTool) -> None:
        text = tool.description or ""
        if isinstance(tool.format, dict) and tool.format.get("type") == "grammar":
            own = tool.format.get("grammar")
            grammar = own if isinstance(own, dict) else tool.format
            text += f"\nThe input follows this grammar ({grammar.get('syntax')}):\n"
            text += str(grammar.get("definition"))
        schema = {
            "type": "object",
            "properties": {_INPUT: {"type": "string", "description": "The text for the tool."}},
            "required": [_INPUT],
            "additionalProperties": False,
        }
        function = {"name": tool.name, "description": text.strip(), "parameters": schema}
        self.tools.append({"type": "function", "function": function})
        self.custom.add(tool.name)

    def _add_namespace(self, value: dict[str, Any], where: str) -> None:
        """Add the functions of a group, but those that are to be loaded later."""
        known = {tool["function"]["name"] for tool in self.tools}
        for place, inner in enumerate(value["tools"]):
            is_function = isinstance(inner, dict) and inner.get("type") == "function"
            if not is_function or inner.get("defer_loading") or inner.get("name") in known:
                _pass_over(f"namespace {value.get('name')}")
                continue
            self.add(inner, f"{where}.tools[{place}]")
            self.namespaces[inner["name"]] = str(value.get("name", ""))


@functools.cache
def _said(kind: str) -> None:
    _log.warning("tools of type %s are run by other servers: they are passed over", kind)


def _pass_over(kind: str) -> None:
    """Log once that tools of a kind are not offered."""
    _said(kind[:100])


def offered(values: Sequence[dict[str, Any]] | None, function: type[Function] = Function) -> Offer:
    """Return the tools of a request; raises `RequestError` that names the field."""
    offer = Offer()
    for place, value in enumerate(values or ()):
        offer.add(value, f"tools[{place}]", function)
    return offer


# -- Texts of custom tools -------------------------------------------------------------------------


def input_arguments(text: object) -> dict[str, Any]:
    """Return the arguments of the function that stands for a custom tool."""
    return {_INPUT: text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)}


class CustomInputs:
    """Takes the parts of a reply, and gives the arguments of custom tools as their text."""

    def __init__(self, custom: Collection[str]) -> None:
        self._custom = custom
        self._index: int | None = None
        self._held = ""

    def take(self, parts: Sequence[Part], *, is_end: bool = False) -> Sequence[Part]:
        """Return the parts; the text of a custom tool comes as a whole, when its call ends."""
        if not self._custom:
            return parts
        taken: list[Part] = []
        for part in parts:
            if isinstance(part, MoreArguments) and part.index == self._index:
                self._held += part.text
                continue
            taken += self._ended()
            taken.append(part)
            if isinstance(part, CallBegun) and part.name in self._custom:
                self._index = part.index
        return [*taken, *(self._ended() if is_end else ())]

    def _ended(self) -> list[Part]:
        if self._index is None:
            return []
        index, held = self._index, self._held
        self._index, self._held = None, ""
        return [MoreArguments(index, _input_in(held), is_text=True)]


def _input_in(arguments: str) -> str:
    """Return the text in arguments, which may have been cut short."""
    for ending in ("", '"}', "}"):
        try:
            value = json.loads(arguments + ending)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            value = value.get(_INPUT, value if value else "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return arguments


# -- The effort of thinking, in the form of each API -----------------------------------------------

_Thinking = Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
_Tokens = Annotated[int, Meta(ge=0), wanted("a number of tokens")]
_WORDS = f"one of {', '.join(LEVELS)}"


ReasoningFormat = Literal["none", "auto", "deepseek", "deepseek-legacy", "raw", "parsed", "hidden"]
"""The values of `reasoning_format`: llama-server's, and from "raw" on Groq's."""
_PLACES: dict[str, Thoughts] = {"none": "content", "raw": "content", "hidden": "left out"}


class ThinkingFields(Struct):
    """Anthropic's `thinking`, which several vendors' chat completions have, too."""

    type: Annotated[_Thinking, one_of(_Thinking)]
    budget_tokens: Annotated[_Tokens | None, wanted("a number of tokens")] = None
    display: Any = None


class ReasoningFields(Struct):
    """The fields of `reasoning` that are read: OpenAI's and OpenRouter's."""

    effort: Any = None
    enabled: bool | None = None
    max_tokens: Annotated[_Tokens | None, wanted("a number of tokens")] = None
    exclude: bool | None = None


def _level(value: object, field: str) -> str | None:
    """Return a word for how much is thought; raises `RequestError` for anything else."""
    if value is None:
        return None
    if isinstance(value, str) and value:
        return value.lower() if value.lower() in LEVELS else value
    raise wrong(field, value, _WORDS)


def _effort(body: ReasoningBody, level: object, level_field: str) -> Effort:
    """Return the effort in the fields of a body; the more particular one counts."""
    given = checked(getattr(body, "reasoning", None) or {}, ReasoningFields, "reasoning")
    word = _level(given.effort, "reasoning.effort") or _level(level, level_field)
    is_on, budget, thinking = given.enabled, given.max_tokens, getattr(body, "thinking", None)
    if thinking is not None:
        own = checked(thinking, ThinkingFields, "thinking")
        is_on = own.type != "disabled" if is_on is None else is_on
        budget = own.budget_tokens if budget is None else budget
    return Effort(is_on, word, budget)


def _thoughts(body: ReasoningBody) -> Thoughts:
    """Return the place of the reasoning in a reply.

    A setting that leaves it out counts most: OpenRouter's `exclude`, and Anthropic's `display:
    omitted`, too.
    """
    reasoning, thinking = getattr(body, "reasoning", None), getattr(body, "thinking", None)
    is_left_out = (thinking or {}).get("display") == "omitted"
    if body.include_reasoning is False or is_left_out or (reasoning or {}).get("exclude") is True:
        return "left out"
    return _PLACES.get(body.reasoning_format or "auto", "apart")
