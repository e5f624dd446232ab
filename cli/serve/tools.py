"""Conversations with tools and reasoning: history, tools, and the plan of a reply.

All APIs' conversations become OpenAI's form, which chat templates read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

from specrun.bindings.errors import TemplateError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.body import shown, wanted
from specrun.cli.serve.errors import RequestError
from specrun.runtime.chat import (
    GENERIC,
    ChatTemplate,
    Effort,
    ForcedCalls,
    ReplyParser,
    ThinkTags,
    TokenReader,
    ToolSyntax,
    control_names,
    is_malformed,
    is_unreadable,
    joined,
    syntax_of,
    think_tags_of,
)
from specrun.runtime.engine import Engine
from specrun.runtime.grammar import Grammar

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
    """Return a call of the history, with its arguments as an object.

    Templates write arguments as JSON themselves; a text would be quoted twice.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}  # of a call that was cut short, say
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{field} is {shown(arguments)}: give a JSON object as a text", field)
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def for_template(messages: Sequence[Message], syntax: ToolSyntax) -> list[Message]:
    """Return the messages with results that have the names of their calls.

    Ids that a template takes in one length only, as Mistral's do, are replaced by their digests,
    and those that its model writes itself by such ones.
    """
    names: dict[str, str] = {}
    ids: dict[str, str] = {}
    made: list[Message] = []
    for message in messages:
        own, call_id = dict(message), message.get("tool_call_id")
        if own.get("tool_calls"):
            for call in own["tool_calls"]:
                name = names[call["id"]] = call["function"]["name"]
                numbered = f"functions.{name}:{len(ids)}"
                fitting = _fitting(call["id"], syntax.id_length)
                ids[call["id"]] = numbered if syntax.numbered_ids else fitting
            own["tool_calls"] = [{**call, "id": ids[call["id"]]} for call in own["tool_calls"]]
        elif own.get("role") == "tool" and isinstance(call_id, str):
            if call_id in names:
                own.setdefault("name", names[call_id])
            own["tool_call_id"] = ids.get(call_id, _fitting(call_id, syntax.id_length))
        made.append(own)
    return made


def _fitting(call_id: str, length: int | None) -> str:
    """Return an id of that many letters and digits: the same for the same one."""
    if length is None or (len(call_id) == length and call_id.isalnum() and call_id.isascii()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:length]


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


# -- Plans of replies ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """The forms that a reply may have in addition to content; by default none.

    `schemas` are those of the arguments, by the names of the tools that may be called. With
    `must_call` the reply is nothing but calls, behind its reasoning; calls of `strict` tools follow
    their schemas wherever they come. `custom` are names of tools that take a text.
    """

    syntax: ToolSyntax | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    think: ThinkTags | None = None
    most_calls: int | None = None
    must_call: bool = False
    strict: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()

    def control_tokens(self, vocabulary: Vocabulary) -> dict[int, str]:
        """Return those marks of calls and of reasoning that are control tokens, by their ids."""
        syntax, think = self.syntax, self.think
        marks = [] if think is None else [think.first, think.last, *think.around]
        if syntax is not None:
            marks += syntax.marks if self.schemas or syntax.read is not None else syntax.around
        return control_names(vocabulary, marks)

    def thinks_already(self, prompt_end: str) -> bool:
        """Whether a prompt ends with the tag that opens the reasoning."""
        return self.think is not None and prompt_end.rstrip().endswith(self.think.first)

    def grammar(
        self,
        vocabulary: Vocabulary,
        prompt_end: str,
        answer: Any = None,  # noqa: ANN401 - a JSON schema
    ) -> Grammar | None:
        """Return the grammar of calls that have to come, or to follow schemas; None for neither.

        `answer` is the schema of a text, which comes instead of calls unless they have to come.
        """
        answer = None if self.must_call else answer
        if answer is None and (self.syntax is None or not (self.must_call or self.strict)):
            return None
        schemas = {
            name: schema if self.must_call or answer is not None or name in self.strict else {}
            for name, schema in self.schemas.items()
        }
        control = {mark: token for token, mark in self.control_tokens(vocabulary).items()}
        forced = ForcedCalls(
            None if self.syntax is None else self.syntax.form,
            schemas,
            control,
            several=self.most_calls != 1,
            may_talk=not self.must_call,
            answer=answer,
        )
        thinking = self.thinks_already(prompt_end)
        return Grammar.lark(forced.grammar(self.think, thinking=thinking))

    def new_id(self) -> str:
        """Return an id for a call."""
        assert self.syntax is not None  # only it brings calls
        return self.syntax.new_id()


class PartReader(TokenReader):
    """Takes one choice's text as it comes and returns its parts.

    `prompt_end` is how the prompt ends: a template may have opened the reasoning already.
    """

    def __init__(self, plan: ReplyPlan, vocabulary: Vocabulary, prompt_end: str) -> None:
        parser: ReplyParser | None = None  # none if only content can come
        if plan.think is not None or plan.syntax is not None:
            parser = ReplyParser(
                plan.syntax,
                plan.schemas,
                think=plan.think,
                thinking=plan.thinks_already(prompt_end),
                most_calls=plan.most_calls,
            )
        super().__init__(parser, plan.control_tokens(vocabulary), splits=plan.think is not None)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A conversation in the form for its template, and the plan of the reply.

    `is_begun`: the last message is an answer that goes on. `is_asked`: the prompt ends with the
    begin of an answer, as the template has it. `no_thoughts`: the answer has no reasoning.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    plan: ReplyPlan = field(default_factory=ReplyPlan)
    is_begun: bool = False
    is_asked: bool = True
    no_thoughts: bool = False


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


_NAMES_OF_TOOLS = ("xml_tools", "functions", "available_tools", "custom_tools")
"""What some templates call the tools."""
_TOOLS_OF_MESSAGE = re.compile(r"""message(\.tools\b|\[['"]tools['"]\])""")
"""How templates read tools that are a field of the system's message, as Phi-4-mini's does."""


def _shown(
    messages: Sequence[Message], tools: Sequence[Tool], template: ChatTemplate, syntax: ToolSyntax
) -> tuple[Sequence[Message], dict[str, Any]]:
    """Return messages and variables that show tools to a model whose template takes no `tools`."""
    if _TOOLS_OF_MESSAGE.search(template.source):
        first, *others = messages
        if first["role"] != "system":
            first, others = {"role": "system", "content": ""}, [*messages]
        listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return [{**first, "tools": listed}, *others], {}
    other = next((name for name in _NAMES_OF_TOOLS if name in template.names), None)
    if other is None:
        return _with_tools(messages, tools, syntax), {}
    return messages, {other: _lines(tools) if other == "functions" else [*tools]}


def _with_tools(
    messages: Sequence[Message], tools: Sequence[Tool], syntax: ToolSyntax
) -> list[Message]:
    """Return the messages with a text about the tools, for a template that knows none."""
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


def plan_turn(
    engine: Engine,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    splits_reasoning: bool = True,
    template_kwargs: Mapping[str, Any],
    effort: Effort | None = None,
    custom: Collection[str] = (),
    is_begun: bool = False,
    is_asked: bool = True,
) -> ChatTurn:
    """Return how a conversation is rendered and its reply read; raises `RequestError`.

    Where the template does not render tools, a text of the system's describes them.
    """
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
    syntax = syntax_of(template.source) or GENERIC
    wished = {} if effort is None else effort.variables(template)
    no_thoughts = effort is not None and effort.thinks is False
    no_thoughts = no_thoughts and not wished.keys() & template_kwargs.keys()
    template_kwargs = {**wished, **template_kwargs}
    if used and "tools" not in template.names:
        messages, named = _shown(messages, used, template, syntax)
        template_kwargs = {**named, **template_kwargs}
    functions = [tool["function"] for tool in used]
    schemas = {function["name"]: function["parameters"] for function in functions}
    for name in choice.names or ():
        if name not in schemas:
            problem = f"tool_choice names {name!r}, which is not among the tools"
            raise RequestError(problem, "tool_choice")
    if choice.names is not None:
        schemas = {name: schemas[name] for name in schemas if name in choice.names}
    plan = ReplyPlan(
        syntax=syntax if used or syntax.read is not None or syntax.begins else None,
        schemas=schemas,
        think=think_tags_of(template.source) if splits_reasoning else None,
        most_calls=None if parallel else 1,
        must_call=choice.mode == "required",
        strict=frozenset(each["name"] for each in functions if each.get("strict")),
        custom=frozenset(custom),
    )
    talk = for_template(messages, syntax)
    return ChatTurn(talk, used, template_kwargs, plan, is_begun, is_asked, no_thoughts)
