"""Whether tools are called, as OpenAI's `tool_choice` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specrun.bindings.errors import OptionError

ToolChoiceValue = Literal["auto", "none", "required"] | Mapping[str, Any] | None
"""A mode, a tool as {"type": "function", "function": {"name": "..."}}, or a list of tools."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called: "auto", "none" or "required"; `names` are those that may be."""

    mode: str = "auto"
    names: frozenset[str] | None = None

    @property
    def must_call(self) -> bool:
        """Whether the reply is a call."""
        return self.mode == "required"

    @classmethod
    def of(cls, given: object) -> ToolChoice:
        """Return the choice that a value of `tool_choice` makes; raises `OptionError`."""
        if given is None:
            return cls()
        if given in ("auto", "none", "required"):
            return cls(str(given))
        if _type_of(given).startswith(_HOSTED):
            return cls()  # of a tool that another server runs
        allowed = _inner(given, "allowed_tools")
        name = _name_of(given)
        if allowed.get("type", "allowed_tools") == "allowed_tools" and "tools" in allowed:
            mode, tools = allowed.get("mode", "auto"), allowed["tools"]
            listed = tools if isinstance(tools, list) else [None]
            called = [tool for tool in listed if _type_of(tool) in _CALLED]
            found = [_name_of(tool) for tool in called]
            names = [each for each in found if isinstance(each, str)]
            if mode in ("auto", "required") and len(names) == len(found):
                return cls(mode, frozenset(names))
        elif isinstance(name, str):
            return cls("required", frozenset([name]))
        form = '{"type": "function", "function": {"name": "..."}}'
        problem = f"tool_choice is {repr(given)[:_SHOWN]}"
        raise OptionError(f"{problem}: give auto, none, required, or {form}")

    def used(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return those of the tools that are shown to the model: all, or none.

        Raises `OptionError` if none can be called, and a call is required.
        """
        if self.must_call and not tools:
            raise OptionError("tool_choice requires a call, and there are no tools")
        if self.mode == "none":
            return ()
        known = {_name_of(tool) for tool in tools}
        for name in self.names or ():
            if name not in known:
                raise OptionError(f"tool_choice names {name!r}, which is not among the tools")
        return tools


_SHOWN = 60  # characters of a value in a message
_CALLED = ("function", "custom", "allowed_tools")
"""The types of tools that clients run themselves, and of lists of them."""
_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer"),
    *("local_shell", "shell", "apply_patch", "tool_search"),
)
"""How the types of tools begin that servers run."""


def _type_of(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return kind if isinstance(kind, str) else "function"


def _name_of(tool: object) -> object:
    """Return the name of a function or of a custom tool."""
    return _inner(tool, "function").get("name") or _inner(tool, "custom").get("name")


def _inner(value: object, name: str) -> Mapping[str, Any]:
    """Return the object in a field; the newer API has its fields beside the type instead."""
    if not isinstance(value, Mapping):
        return {}
    inner = value.get(name, value)
    return inner if isinstance(inner, Mapping) else {}
