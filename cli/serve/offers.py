"""Tools that a request offers: functions, custom tools, and those that other servers would run.

A custom tool takes a text. Models know functions only: it is offered as one with a single text,
and its calls are handed out in their own form. Tools that other servers run (web search, shells,
image generation) are passed over, and the log says so.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Struct

from specrun.cli.serve.body import checked, wanted
from specrun.cli.serve.tools import Function, Tool
from specrun.runtime.chat import CallBegun, MoreArguments, Part

_log = logging.getLogger(__name__)
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
