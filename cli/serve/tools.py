"""Fields about tools and reasoning, read from requests of every API in one form: OpenAI's."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrun.bindings.errors import TemplateError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.body import Fields, shown
from specrun.cli.serve.errors import RequestError
from specrun.runtime.chat import (
    ChatTemplate,
    Content,
    ForcedCalls,
    Part,
    ReplyParser,
    ThinkTags,
    ToolSyntax,
    syntax_of,
    think_tags_of,
)
from specrun.runtime.engine import Engine
from specrun.runtime.grammar import Grammar
from specrun.runtime.round import TokenEvent

# -- Messages with tool calls in the form that chat templates read, whichever API they came by ----


Message = dict[str, Any]
_MOST_CALLS = 128


def for_template(messages: Sequence[Message], id_length: int | None = None) -> list[Message]:
    """Return the messages with their calls' arguments as objects and results with their names.

    Templates write arguments as JSON themselves; a text would be quoted twice. Ids that a template
    takes in one length only, as Mistral's do, are replaced by digests of theirs.
    """
    names: dict[str, str] = {}
    made: list[Message] = []
    for place, message in enumerate(messages):
        given = message.get("tool_calls")
        if not given:  # templates ask whether there are some
            made.append(_result(message, names, id_length))
            continue
        field = f"messages[{place}].tool_calls"
        if not isinstance(given, list) or len(given) > _MOST_CALLS:
            raise RequestError(f"{field} is {shown(given)}: give a list of calls", field)
        calls = [_call(each, f"{field}[{k}]") for k, each in enumerate(given)]
        for call in calls:
            names[call["id"]] = call["function"]["name"]
            call["id"] = _fitting(call["id"], id_length)
        made.append({**message, "tool_calls": calls})
    return made


def _result(message: Message, names: Mapping[str, str], id_length: int | None) -> Message:
    own = {key: value for key, value in message.items() if key != "tool_calls"}
    call_id = own.get("tool_call_id")
    if own.get("role") != "tool" or not isinstance(call_id, str):
        return own
    if call_id in names:
        own.setdefault("name", names[call_id])
    return {**own, "tool_call_id": _fitting(call_id, id_length)}


def _call(value: object, field: str) -> Message:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(name, str):
        form = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}'
        raise RequestError(f"{field} is {shown(value)}: give {form}", field)
    arguments = _object(function.get("arguments"), f"{field}.function.arguments")
    call_id = value.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _object(arguments: object, field: str) -> Message:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}  # of a call that was cut short, say
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{field} is {shown(arguments)}: give a JSON object as a text", field)
    return arguments


def _fitting(call_id: str, length: int | None) -> str:
    """Return an id of that many letters and digits: the same for the same one."""
    if length is None or (len(call_id) == length and call_id.isalnum() and call_id.isascii()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:length]


# -- Plan of a reply: the tools that it may call, their syntax, and the marks of its reasoning ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """What is looked for in a reply; nothing: all of its text is content.

    `schemas` are those of the arguments, by the names of the tools that may be called. With
    `must_call` the reply is nothing but calls, behind its reasoning; calls of `strict` tools follow
    their schemas wherever they come.
    """

    syntax: ToolSyntax | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    think: ThinkTags | None = None
    most_calls: int | None = None
    must_call: bool = False
    strict: frozenset[str] = frozenset()

    @property
    def is_active(self) -> bool:
        """Whether anything but content may come."""
        return self.think is not None or (self.syntax is not None and bool(self.schemas))

    @property
    def marks(self) -> Sequence[str]:
        """Texts that take a reply apart, which may be control tokens."""
        calls = self.syntax.marks if self.syntax is not None and self.schemas else ()
        return (*calls, *(self.think or ()))

    def thinks_already(self, prompt_end: str) -> bool:
        """Whether a prompt ends with the tag that opens the reasoning."""
        return self.think is not None and prompt_end.rstrip().endswith(self.think[0])

    def grammar(self, vocabulary: Vocabulary, prompt_end: str) -> Grammar | None:
        """Return the grammar of calls that have to come, or to follow schemas; None for neither."""
        if self.syntax is None or not (self.must_call or self.strict):
            return None
        schemas = {
            name: schema if self.must_call or name in self.strict else {}
            for name, schema in self.schemas.items()
        }
        control = {mark: token for token, mark in control_tokens(self.marks, vocabulary).items()}
        several = self.most_calls != 1
        forced = ForcedCalls(
            self.syntax.form, schemas, control, several=several, may_talk=not self.must_call
        )
        thinking = self.thinks_already(prompt_end)
        return Grammar.lark(forced.grammar(self.think, thinking=thinking))

    def new_id(self) -> str:
        """Return an id for a call."""
        assert self.syntax is not None  # only it brings calls
        return self.syntax.new_id()


class PartReader:
    """Takes one choice's text as it comes and returns its parts.

    Control tokens stand for no text; those that mark calls or reasoning are read by their names.
    `prompt_end` is how the prompt ends: a template may have opened the reasoning already.
    """

    def __init__(self, plan: ReplyPlan, vocabulary: Vocabulary, prompt_end: str = "") -> None:
        self._parser: ReplyParser | None = None
        self._marks: dict[int, str] = {}
        if not plan.is_active:
            return
        self._parser = ReplyParser(
            plan.syntax,
            plan.schemas,
            think=plan.think,
            thinking=plan.thinks_already(prompt_end),
            most_calls=plan.most_calls,
        )
        self._marks = control_tokens(plan.marks, vocabulary)

    @property
    def done(self) -> bool:
        """Whether the reply has all the calls that it may have: no more text is wanted."""
        return self._parser is not None and self._parser.done

    def read(self, events: Sequence[TokenEvent]) -> Sequence[Part]:
        """Return the parts that became certain with these tokens."""
        marks = self._marks
        if not marks:
            return self.push("".join([event.text for event in events]))
        return self.push("".join([marks.get(each.token_id, "") + each.text for each in events]))

    def push(self, text: str) -> Sequence[Part]:
        """Return the parts that became certain with a text."""
        if self._parser is None:
            return (Content(text),) if text else ()
        return self._parser.push(text)

    def finish(self, text: str) -> Sequence[Part]:
        """Return what is left of the parts, with the last of the text."""
        if self._parser is None:
            return self.push(text)
        return [*self._parser.push(text), *self._parser.finish()]


def control_tokens(texts: Sequence[str], vocabulary: Vocabulary) -> dict[int, str]:
    """Return those of the texts that are control tokens, by their ids."""
    found: dict[int, str] = {}
    for text in texts:
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
        if len(tokens) == 1 and not vocabulary.piece(tokens[0]):
            found[tokens[0]] = text
    return found


Tool = dict[str, Any]
MOST_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_REASONING = ("none", "auto", "deepseek", "deepseek-legacy")
_NO_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called: "auto", "none" or "required"; `names` are those that may be."""

    mode: str = "auto"
    names: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A conversation as its template is to have it, and what is looked for in the reply."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    plan: ReplyPlan = field(default_factory=ReplyPlan)


def read_tools(given: object, where: str = "tools") -> list[Tool]:
    """Return OpenAI's tools, with what templates ask for and clients may leave out."""
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise RequestError(f"{where} is {shown(given)}: give a list of functions", where)
    tools = [_tool(value, f"{where}[{place}]") for place, value in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            problem = f"{where}[{place}] is named {name!r} as another one: rename it"
            raise RequestError(problem, f"{where}[{place}]")
    return tools


def _tool(value: object, where: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        form = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
        raise RequestError(f"{where} is {shown(value)}: give a function, as {form}", where)
    return function_tool(function, f"{where}.function")


def function_tool(function: Mapping[str, Any], where: str, schema: str = "parameters") -> Tool:
    """Return OpenAI's form of a function whose arguments' schema is in the field `schema`."""
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        field_name = f"{where}.name"
        wanted = "1 to 128 letters, digits, '_', '-' or '.'"
        raise RequestError(f"{field_name} is {shown(name)}: give {wanted}", field_name)
    if description is not None and not isinstance(description, str):
        field_name = f"{where}.description"
        raise RequestError(f"{field_name} is {shown(description)}: give a text", field_name)
    parameters = function.get(schema)
    if parameters is not None and not isinstance(parameters, dict):
        field_name = f"{where}.{schema}"
        raise RequestError(f"{field_name} is {shown(parameters)}: give a JSON schema", field_name)
    own: dict[str, Any] = {"name": name, "description": description or ""}
    if function.get("strict") is True:
        own["strict"] = True
    return {"type": "function", "function": {**own, "parameters": parameters or _NO_ARGUMENTS}}


def read_tool_choice(fields: Fields) -> ToolChoice:
    """Return OpenAI's `tool_choice`."""
    given = fields.get("tool_choice")
    if given is None:
        return ToolChoice()
    if given in ("auto", "none", "required"):
        return ToolChoice(given)
    allowed = _inner(given, "allowed_tools")
    name = _inner(given, "function").get("name")
    if allowed.get("type", "allowed_tools") == "allowed_tools" and "tools" in allowed:
        mode, tools = allowed.get("mode", "auto"), allowed["tools"]
        found = [_inner(tool, "function").get("name") for tool in _listed(tools)]
        names = [each for each in found if isinstance(each, str)]
        if mode in ("auto", "required") and len(names) == len(found):
            return ToolChoice(mode, frozenset(names))
    elif isinstance(name, str):
        return ToolChoice("required", frozenset([name]))
    form = '{"type": "function", "function": {"name": "..."}}'
    raise fields.wrong("tool_choice", f"auto, none, required, or {form}")


def _inner(value: object, name: str) -> Mapping[str, Any]:
    """Return the object in a field; the newer API has what is in it beside the type instead."""
    if not isinstance(value, dict):
        return {}
    inner = value.get(name, value)
    return inner if isinstance(inner, dict) else {}


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else [None]


def read_turn(fields: Fields, engine: Engine, messages: Sequence[Message]) -> ChatTurn:
    """Return the turn that OpenAI's and llama-server's fields ask for."""
    for old in ("functions", "function_call"):
        if old in fields:
            raise RequestError(f"{old} is what OpenAI had before tools: give tools", old)
    reasoning = fields.text("reasoning_format") or "auto"
    if reasoning not in _REASONING:
        raise fields.wrong("reasoning_format", f"one of {', '.join(_REASONING)}")
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise fields.wrong("chat_template_kwargs", 'an object, as {"enable_thinking": false}')
    return plan_turn(
        engine,
        messages,
        tools=read_tools(fields.get("tools")),
        choice=read_tool_choice(fields),
        parallel=fields.flag("parallel_tool_calls", default=True),
        splits_reasoning=reasoning != "none",
        template_kwargs=kwargs or {},
    )


def plan_turn(
    engine: Engine,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool = True,
    splits_reasoning: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatTurn:
    """Return how a conversation is rendered and its reply read; raises `RequestError`.

    A template that knows no tools is refused where there are some, and so is one whose model's
    syntax of calls is not known.
    """
    if choice.mode == "required" and not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    used = tools if choice.mode != "none" else ()
    template = _template(engine, used)
    if template is None:  # what needs one says so
        if used:
            raise RequestError("tools need a chat template, and this model has none", "tools")
        return ChatTurn(messages, (), template_kwargs or {})
    syntax = syntax_of(template.source) if used else None
    if used and "tools" not in template.names:
        problem = "this model's chat template knows no tools: leave them out, or give the server"
        raise RequestError(f"{problem} one that does (--chat-template-file)", "tools")
    if used and syntax is None:
        families = "Hermes and Qwen, Qwen3-Coder, Llama 3, Mistral"
        problem = f"how this model writes calls is not known (known: {families})"
        raise RequestError(f"{problem}: leave tools out", "tools")
    known = syntax_of(template.source)
    plan = ReplyPlan(
        syntax=syntax,
        schemas=_schemas(used, choice),
        think=think_tags_of(template.source) if splits_reasoning else None,
        most_calls=None if parallel else 1,
        must_call=choice.mode == "required",
        strict=frozenset(
            tool["function"]["name"] for tool in used if tool["function"].get("strict")
        ),
    )
    id_length = known.id_length if known is not None else None
    return ChatTurn(for_template(messages, id_length), used, template_kwargs or {}, plan)


def _template(engine: Engine, tools: Sequence[Tool]) -> ChatTemplate | None:
    try:
        return engine.tool_template if tools else engine.chat_template
    except TemplateError:
        return None


def _schemas(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any]:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if choice.names is None:
        return schemas
    for name in choice.names:
        if name not in schemas:
            problem = f"tool_choice names {name!r}, which is not among the tools"
            raise RequestError(problem, "tool_choice")
    return {name: schema for name, schema in schemas.items() if name in choice.names}
