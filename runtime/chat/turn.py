"""Turns of a conversation: the messages and tools for a chat template, and the reply's plan."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specrun.bindings.errors import OptionError
from specrun.runtime.chat.effort import Effort
from specrun.runtime.chat.families import GENERIC, syntax_of, think_tags_of
from specrun.runtime.chat.fitting import arguments_of
from specrun.runtime.chat.plan import ReplyPlan
from specrun.runtime.chat.reply import Thoughts
from specrun.runtime.chat.syntax import ToolSyntax
from specrun.runtime.chat.template import ChatTemplate, ChatTurn, require_message

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
_CALL = '{"id": "...", "function": {"name": "...", "arguments": {}}}'
_TOOL = '{"type": "function", "function": {"name": "...", "parameters": {}}}'


# == Whether tools are called, as OpenAI's `tool_choice` has it ====================================


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


# == Messages, tools and the plan ==================================================================


def for_template(messages: Sequence[Message], syntax: ToolSyntax) -> list[Message]:
    """Return the messages with results that have the names of their calls.

    Ids that a template takes in one length only, as Mistral's do, are replaced by their digests,
    and those that its model writes itself by such ones.
    """
    names: dict[str, str] = {}
    ids: dict[str, str] = {}
    made: list[Message] = []
    for message in messages:
        own = dict(require_message(message))
        call_id = own.get("tool_call_id")
        if own.get("tool_calls"):
            own["tool_calls"] = calls = [_call(call) for call in own["tool_calls"]]
            for call in calls:
                given, name = call["id"], call["function"]["name"]
                numbered = f"functions.{name}:{len(ids)}"
                fitting = _fitting(given, syntax.id_length)
                names[given], ids[given] = name, numbered if syntax.numbered_ids else fitting
                call["id"] = ids[given]
        elif own.get("role") == "tool" and isinstance(call_id, str):
            if call_id in names:
                own.setdefault("name", names[call_id])
            own["tool_call_id"] = ids.get(call_id, _fitting(call_id, syntax.id_length))
        made.append(own)
    return made


def _call(call: object) -> dict[str, Any]:
    """Return a call of the history; raises `OptionError` if it is none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or "name" not in function:
        raise OptionError(f"tool_calls is {call!r}: give {_CALL}")
    arguments = arguments_of(function.get("arguments"))
    own = {**call, "function": {**function, "arguments": arguments}}
    return {"type": "function", **own, "id": str(call.get("id") or "")}


def _fitting(call_id: str, length: int | None) -> str:
    """Return an id of that many letters and digits: the same for the same one."""
    if length is None or (len(call_id) == length and call_id.isalnum() and call_id.isascii()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:length]


_NAMES_OF_TOOLS = ("xml_tools", "functions", "available_tools", "custom_tools")
"""The name of the tools in some templates."""
_TOOLS_OF_MESSAGE = re.compile(r"""message(\.tools\b|\[['"]tools['"]\])""")
"""How templates read tools that are a field of the system's message, as Phi-4-mini's does."""


def _shown(
    messages: Sequence[Message], tools: Sequence[Tool], template: ChatTemplate, syntax: ToolSyntax
) -> tuple[Sequence[Message], dict[str, Any]]:
    """Return messages and variables that show tools to a model whose template takes no `tools`."""
    if _TOOLS_OF_MESSAGE.search(template.source):
        first, others = messages[0] if messages else {}, messages[1:]
        if first.get("role") != "system":
            first, others = {"role": "system", "content": ""}, messages
        listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return [{**first, "tools": listed}, *others], {}
    other = next((name for name in _NAMES_OF_TOOLS if name in template.names), None)
    if other is None:
        return _with_tools(messages, tools, syntax), {}
    return messages, {other: _lines(tools) if other == "functions" else [*tools]}


def _with_tools(
    messages: Sequence[Message], tools: Sequence[Tool], syntax: ToolSyntax
) -> list[Message]:
    """Return the messages with a text about the tools, for a template without tools."""
    example = syntax.form.written([("NAME", {"ARGUMENT": "VALUE"})])
    text = (
        "You may call functions. Each line describes one, its parameters by a JSON schema:\n"
        f"{_lines(tools)}\n\nTo call a function, answer with its name and arguments in exactly "
        f"this form, and nothing behind it:\n{example}\nThe results come in the next message. "
        "If no function is needed, answer in plain text."
    )
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    joined = "\n\n".join(each for each in (first["content"], text) if each)
    return [{**first, "content": joined}, *messages[1:]]


def _lines(tools: Sequence[Tool]) -> str:
    return "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)


def _function(tool: object) -> Mapping[str, Any]:
    """Return the function that a tool is; raises `OptionError` if it is none."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise OptionError(f"tools is a list with {tool!r}: give each as {_TOOL}")
    return function


def turn_of(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    choice: ToolChoice,
    most_calls: int | None = None,
    custom: Collection[str] = (),
    thoughts: Thoughts = "apart",
    template_kwargs: Mapping[str, Any] | None = None,
    effort: Effort | None = None,
    is_begun: bool = False,
    is_asked: bool = True,
) -> ChatTurn:
    """Return how a conversation is rendered and its reply read.

    `tools` are those that the `choice` uses. If the template does not render tools, a text of the
    system's describes them.
    """
    syntax, template_kwargs = syntax_of(template.source) or GENERIC, template_kwargs or {}
    functions = [_function(tool) for tool in tools]
    wished = {} if effort is None else effort.variables(template)
    no_thoughts = effort is not None and effort.thinks is False
    no_thoughts = no_thoughts and not wished.keys() & template_kwargs.keys()
    template_kwargs = {**wished, **template_kwargs}
    if tools and "tools" not in template.names:
        messages, named = _shown(messages, tools, template, syntax)
        template_kwargs = {**named, **template_kwargs}
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    if choice.names is not None:
        schemas = {name: schemas[name] for name in schemas if name in choice.names}
    plan = ReplyPlan(
        syntax=syntax if tools or syntax.tells_answers else None,
        schemas=schemas,
        think=think_tags_of(template.source),
        most_calls=most_calls,
        must_call=choice.must_call,
        strict=frozenset(each["name"] for each in functions if each.get("strict")),
        custom=frozenset(custom),
        thoughts=thoughts,
    )
    talk = for_template(messages, syntax)
    return ChatTurn(talk, tools, template_kwargs, plan, is_begun, is_asked, no_thoughts)
