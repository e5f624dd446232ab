"""Replies taken apart by families of models (Hermes, Llama 3, Mistral, Qwen3-Coder): tool calls."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from specrun.runtime.chat.reader import (
    BLANK,
    CallBegun,
    Content,
    EnoughError,
    NotACallError,
    Part,
    Reader,
    Reading,
    Reasoning,
    merged,
)
from specrun.runtime.grammar import SPACES, any_of, followed

# == Tool calls as families of models write them ===================================================


TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_NAMES_OF_ARGUMENTS = ("arguments", "parameters")


def read_hermes(reader: Reader) -> Reading[None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, among content."""
    while (yield from reader.until((TOOL_CALL,))):
        if (yield from reader.attempt(_object)):
            yield from reader.follows(END_TOOL_CALL)


def read_llama3(reader: Reader) -> Reading[None]:
    """Read `{"name": ..., "parameters": {...}}`: the reply's begin, or behind `<|python_tag|>`."""
    yield from _objects(reader)
    while (yield from reader.until((PYTHON_TAG,))):
        yield from _objects(reader)


def read_mistral(reader: Reader) -> Reading[None]:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{}`.

    The second is how models since 2025 write it, each call behind a marker of its own.
    """
    while (yield from reader.until((TOOL_CALLS,))):
        yield from reader.attempt(_after_tool_calls)


def read_qwen_coder(reader: Reader) -> Reading[None]:
    """Read `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""
    while marker := (yield from reader.until((TOOL_CALL, FUNCTION))):
        call = _tagged_function if marker == FUNCTION else _enclosed_function
        if (yield from reader.attempt(call)):
            yield from reader.follows(END_TOOL_CALL)


# -- calls that are JSON objects -------------------------------------------------------------------


def _objects(reader: Reader) -> Reading[None]:
    """Read calls that follow each other, with or without a semicolon between them."""
    if not (yield from reader.attempt(_object)):
        return
    while (yield from reader.attempt(_separated_object)):
        pass


def _separated_object(reader: Reader) -> Reading[None]:
    separator = yield from reader.after_blank()
    if separator not in (";", ","):
        reader.back(separator)
    yield from _object(reader)


def _object(reader: Reader) -> Reading[None]:
    """Read one call: its name and arguments may come in any order, among other keys."""
    if (yield from reader.after_blank()) != "{":
        raise NotACallError
    name: str | None = None
    arguments: Any = None
    begun = False
    separator = ","
    while separator == ",":
        if (yield from reader.after_blank()) != '"':
            raise NotACallError
        key = yield from reader.string()
        if (yield from reader.after_blank()) != ":":
            raise NotACallError
        first = yield from reader.after_blank()
        if key in _NAMES_OF_ARGUMENTS and name is not None and first == "{" and not begun:
            yield from _arguments(reader, name)
            begun = True
        elif key == "name" and not begun:
            name = _known(reader, (yield from reader.value(first)))
        else:
            value = yield from reader.value(first)
            arguments = value if key in _NAMES_OF_ARGUMENTS else arguments
        separator = yield from reader.after_blank()
    if separator != "}" or name is None:
        raise NotACallError
    if not begun:
        text = _as_object(arguments)
        reader.begin(name)
        reader.argue(text)
    reader.end_call()


def _arguments(reader: Reader, name: str) -> Reading[None]:
    """Give out the arguments whose bracket was read, as they come."""
    second = yield from reader.after_blank()
    if second not in ('"', "}"):  # a dictionary of Python's, for instance: not to be begun
        raise NotACallError
    reader.back(second)
    reader.begin(name)
    reader.argue("{")
    yield from reader.bracketed(reader.argue)


def _known(reader: Reader, name: object) -> str:
    if not isinstance(name, str) or name not in reader.tools:
        raise NotACallError
    return name


def _as_object(arguments: object) -> str:
    """Return arguments that came whole as JSON: some models write them as a string of it."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise NotACallError from error
    if arguments is None:
        return "{}"
    if not isinstance(arguments, dict):
        raise NotACallError
    return json.dumps(arguments, ensure_ascii=False)


# -- Mistral ---------------------------------------------------------------------------------------


def _after_tool_calls(reader: Reader) -> Reading[None]:
    first = yield from reader.after_blank()
    if first == "{":
        reader.back(first)
        yield from _object(reader)
    elif first == "[":
        separator = ","
        while separator == ",":
            reader.hold()
            yield from _object(reader)
            separator = yield from reader.after_blank()
        if separator != "]":
            raise NotACallError
    else:  # `name[ARGS]{...}`; some models name the call in between: `[CALL_ID]id`
        name = first + (yield from _identifier(reader))
        if (yield from reader.follows(CALL_ID)):
            yield from _identifier(reader)
        yield from reader.follows(ARGS)
        if (yield from reader.after_blank()) != "{":
            raise NotACallError
        yield from _arguments(reader, _known(reader, name))
        reader.end_call()


def _identifier(reader: Reader) -> Reading[str]:
    name = ""
    while (character := (yield from reader.next())) and character not in BLANK + "[{":
        name += character
    reader.back(character)
    return name


# -- calls that are tags ---------------------------------------------------------------------------


def _enclosed_function(reader: Reader) -> Reading[None]:
    if not (yield from reader.follows(FUNCTION)):
        yield from reader.next()
        raise NotACallError
    yield from _tagged_function(reader)


def _tagged_function(reader: Reader) -> Reading[None]:
    """Read the call whose name comes next; each argument is given out when it is whole."""
    name = _known(reader, (yield from _tag(reader)))
    reader.begin(name)
    reader.argue("{")
    separator = ""
    while (yield from reader.follows(PARAMETER)):
        key = yield from _tag(reader)
        value = yield from _raw_value(reader)
        schema = reader.tools[name]
        properties = schema.get("properties") if isinstance(schema, dict) else None
        described = properties.get(key) if isinstance(properties, dict) else None
        typed: object = value  # in the form of its schema: text, or the value of the text as JSON
        if not takes_text(described):
            with suppress(ValueError, RecursionError):
                typed = json.loads(value)
        text = json.dumps(typed, ensure_ascii=False)
        reader.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: {text}")
        separator = ", "
    reader.argue("}")
    if not (yield from reader.follows(END_FUNCTION)):
        yield from reader.next()
        raise NotACallError
    reader.end_call()


def _tag(reader: Reader) -> Reading[str]:
    """Return the text before the bracket that closes a tag."""
    name = ""
    while (character := (yield from reader.next())) != ">":
        if not character or character in "\n<":
            raise NotACallError
        name += character
    return name


def _raw_value(reader: Reader) -> Reading[str]:
    """Return the text of an argument, without the line breaks next to its tags."""
    text = ""
    while not text.endswith(END_PARAMETER):
        character = yield from reader.next()
        if not character:
            raise NotACallError
        text += character
    return text.removesuffix(END_PARAMETER).removeprefix("\n").removesuffix("\n")


def takes_text(schema: object) -> bool:
    """Whether a schema takes texts only."""
    if not isinstance(schema, dict):
        return False
    known = schema.get("enum")
    if isinstance(known, list):
        return bool(known) and all(isinstance(value, str) for value in known)
    return schema.get("type") == "string"


# == Grammars of tool calls ========================================================================
#
# The grammars are in llguidance's dialect of Lark. Arguments have the spaces that templates write,
# so that all of a call's frame is forced, and drafted for nothing.


_SPACES = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_BLANK = "/[ \\n]*/"
_REPLY = "schema of a reply"


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around calls: before and behind all, each, its name and its arguments.

    The first of them begins with `mark`, if there is one; a call without one may follow a
    `tag`. `tagged` arguments are tags instead of a JSON object.
    """

    before_name: str
    before_arguments: str
    behind: str = ""
    before_all: str = ""
    behind_all: str = ""
    separator: str | None = None
    tagged: bool = False
    mark: str = ""
    tag: str = ""

    @property
    def behind_mark(self) -> CallForm:
        """The rest of the form behind a mark."""
        if self.before_all:
            return replace(self, before_all=self.before_all.removeprefix(self.mark))
        # Each call has a mark of its own.
        return replace(self, before_name=self.before_name.removeprefix(self.mark), separator=None)


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The calls that are required: one of these tools, or several if the form has a separator.

    With `may_talk` none is required: text may surround calls, but a text that begins as a call is
    one. With `answer` a text by this schema may come instead, and without a form no call may.
    `control` are ids of marks that are control tokens, which a grammar names by id.
    """

    form: CallForm | None
    schemas: Mapping[str, Any]
    control: Mapping[str, int]
    several: bool = False
    may_talk: bool = False
    answer: Any = None

    def grammar(self, think: tuple[str, str] | None = None, *, thinking: bool = False) -> str:
        """Return the grammar; before the calls the model may think, and must end its reasoning.

        `thinking`: the prompt opened the reasoning already.
        """
        rules = _Rules(self.control)
        start = rules.add("reply", self._reply(rules))
        if think is not None:
            thought = rules.until(think[1]) + f" {_BLANK}"
            whole = f"{rules.text(think[0])} {thought}"
            start = f"{thought} {start}" if thinking else f"({whole})? {start}"
        return rules.source(start)

    def _reply(self, rules: _Rules) -> str:
        form = self.form if self.schemas else None
        if form is None:
            return rules.json(self.answer, SPACES)
        if self.answer is None:
            return self._talk(rules, form) if self.may_talk else self._calls(rules, form)
        if form.mark:
            return f"{self._calls(rules, form)} | {rules.json(self.answer, SPACES)}"
        # Both begin with a bracket: one schema has them, so that they share what they begin with.
        calls = [_call_schema(form, name, schema) for name, schema in self.schemas.items()]
        texts = rules.json(any_of([followed(self.answer, _REPLY, {}), *calls]), SPACES)
        if form.tag not in self.control:
            return texts
        return f"{rules.text(form.tag)} {rules.json(any_of(calls), SPACES)} | {texts}"

    def _calls(self, rules: _Rules, form: CallForm) -> str:
        calls: list[str] = []
        for name, schema in self.schemas.items():
            fields = schema if isinstance(schema, dict) else {}
            if form.tagged:
                arguments = _tags(rules, _with_definitions(fields))
            else:
                arguments = rules.json({"type": "object", **fields})
            before = rules.text(form.before_name + name + form.before_arguments)
            calls.append(f"{before} {arguments} {rules.text(form.behind)}")
        rules.add("call", " | ".join(calls))
        many = "call"
        if self.several and form.separator is not None:
            many = f"call ({rules.text(form.separator)} call)*"
        return f"{rules.text(form.before_all)} {many} {rules.text(form.behind_all)}"

    def _talk(self, rules: _Rules, form: CallForm) -> str:
        """Return text and calls: behind a mark, or instead of a text that begins with a bracket."""
        calls = rules.add("calls", self._calls(rules, form.behind_mark))
        if not form.mark:
            tag = f"({rules.text(form.tag)})?" if form.tag in self.control else ""
            return f"/\\s*([^\\s{{](?s:.*))?/ | {tag} {calls}"
        times = "*" if self.several else "?"
        return f"({rules.until(form.mark)} {calls}){times} /(?s:.*)/"


def _call_schema(form: CallForm, name: str, schema: object) -> Mapping[str, Any]:
    """Return the schema of a call that is a JSON object: of its name, and then its arguments."""
    frame = json.loads(f"{form.before_name}{name}{form.before_arguments}{{}}{form.behind}")
    fields = schema if isinstance(schema, dict) else {}
    arguments = followed({"type": "object", **fields}, _REPLY, {})
    definitions = arguments.pop("$defs", {})
    return {
        "type": "object",
        "properties": {key: {"const": v} if v != {} else arguments for key, v in frame.items()},
        "required": [*frame],
        "additionalProperties": False,
        "$defs": definitions,
    }


class _Rules:
    """Rules of a grammar, as they come to be needed."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        """Add a rule; return its name."""
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, text: str | None) -> str:
        """Return a text, with control tokens by their ids."""
        if not text:
            return ""
        marks = "|".join(map(re.escape, self._control)) or "(?!)"
        pieces = [piece for piece in re.split(f"({marks})", text) if piece]
        return " ".join(
            f"<[{self._control[piece]}]>"
            if piece in self._control
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
        )

    def json(self, schema: Any, spaces: Mapping[str, Any] = _SPACES) -> str:  # noqa: ANN401
        """Return a rule of the JSON values of a schema."""
        source = json.dumps(followed(schema, _REPLY, spaces))
        return self.add(f"json_{len(self._rules)}", f"%json {source}")

    def until(self, mark: str) -> str:
        """Return a rule of any text up to a mark, and the mark."""
        if mark in self._control:
            return f"/(?s:.*)/ {self.text(mark)}"
        escaped = "\\n".join(map(re.escape, mark.split("\n"))).replace("/", "\\/")
        name = f"until_{len(self._rules)}"
        self.add(f"{name}[lazy]", f"/(?s:.*){escaped}/")
        return name

    def source(self, start: str) -> str:
        """Return the grammar that begins with `start`."""
        return "\n".join([f"start: {start}", *self._rules, ""])


def _tagged(rules: _Rules, schema: object) -> str:
    """Return an argument and its closing tag: texts unchanged, all else as JSON."""
    fields, closing = schema if isinstance(schema, dict) else {}, f"\n{END_PARAMETER}\n"
    if not takes_text(schema):
        return f"{rules.json(fields)} {rules.text(closing)}"
    if "enum" not in fields:
        return rules.until(closing)
    values = " | ".join(rules.text(str(value)) for value in fields["enum"])
    return f"({values}) {rules.text(closing)}"


def _with_definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose properties have its definitions: each is a text of its own."""
    properties = schema.get("properties")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if not (shared and isinstance(properties, dict)):
        return schema
    alone = {
        name: {**value, **shared} if isinstance(value, dict) else value
        for name, value in properties.items()
    }
    return {**schema, "properties": alone}


def _tags(rules: _Rules, schema: Mapping[str, Any]) -> str:
    """Return the tags of the arguments, in the schema's order; optional ones may be left out."""
    properties, required = schema.get("properties"), schema.get("required")
    tags: list[str] = []
    for key, value in (properties if isinstance(properties, dict) else {}).items():
        tag = rules.text(f"{PARAMETER}{key}>\n") + " " + _tagged(rules, value)
        is_required = isinstance(required, list) and key in required
        tags.append(tag if is_required else f"({tag})?")
    return " ".join(tags)


# == Families of chat templates: their syntax of tool calls and of reasoning =======================
#
# Nothing in a model's file names its family; the marks that the template itself writes do.


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family writes tool calls.

    `read` parses them; `marks` are texts that are control tokens in most vocabularies of the
    family, which the text of an answer otherwise leaves out. `form` is the form of forced calls.
    `id_length` is the number of letters and digits of an id in the family's templates, None if any
    number will do.
    """

    name: str
    read: Callable[[Reader], Reading[None]]
    marks: tuple[str, ...]
    form: CallForm
    id_length: int | None = None

    def new_id(self) -> str:
        """Return an id for a call."""
        letters = string.ascii_letters + string.digits
        made = "".join(secrets.choice(letters) for _ in range(self.id_length or 24))
        return f"call_{made}" if self.id_length is None else made


HERMES = ToolSyntax(
    "hermes",
    read_hermes,
    (TOOL_CALL, END_TOOL_CALL),
    CallForm(
        f'{TOOL_CALL}\n{{"name": "',
        '", "arguments": ',
        behind=f"}}\n{END_TOOL_CALL}",
        separator="\n",
        mark=TOOL_CALL,
    ),
)
LLAMA3 = ToolSyntax(
    "llama3",
    read_llama3,
    (PYTHON_TAG,),
    CallForm('{"name": "', '", "parameters": ', behind="}", tag=PYTHON_TAG),
)
MISTRAL = ToolSyntax(
    "mistral",
    read_mistral,
    (TOOL_CALLS, CALL_ID, ARGS),
    CallForm(
        '{"name": "',
        '", "arguments": ',
        behind="}",
        before_all=f"{TOOL_CALLS}[",
        behind_all="]",
        separator=", ",
        mark=TOOL_CALLS,
    ),
    id_length=9,
)
MISTRAL_V11 = replace(MISTRAL, form=CallForm(TOOL_CALLS, ARGS, separator="", mark=TOOL_CALLS))
QWEN_CODER = ToolSyntax(
    "qwen3-coder",
    read_qwen_coder,
    (TOOL_CALL, END_TOOL_CALL),
    CallForm(
        f"{TOOL_CALL}\n{FUNCTION}",
        ">\n",
        behind=f"{END_FUNCTION}\n{END_TOOL_CALL}",
        separator="\n",
        tagged=True,
        mark=TOOL_CALL,
    ),
)


def syntax_of(source: str) -> ToolSyntax | None:
    """Return the syntax of tool calls of a chat template's model, None if it is unknown."""
    if TOOL_CALLS in source:
        return MISTRAL_V11 if ARGS in source else MISTRAL
    if TOOL_CALL in source:
        return QWEN_CODER if FUNCTION in source else HERMES
    is_llama3 = "<|start_header_id|>" in source and '"parameters"' in source
    return LLAMA3 if is_llama3 or PYTHON_TAG in source else None


ThinkTags = tuple[str, str]
_THINK_TAGS: tuple[ThinkTags, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def think_tags_of(source: str) -> ThinkTags | None:
    """Return the tags around the reasoning of a chat template's model, None if it has none."""
    return next((tags for tags in _THINK_TAGS if tags[0] in source or tags[1] in source), None)


# == A reply as it comes: reasoning, content and tool calls ========================================


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the tool's name, and its arguments as the model wrote them, JSON if it was able."""

    name: str
    arguments: str


@dataclass(slots=True)
class Reply:
    """The parts of a reply put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Sequence[Part]) -> None:
        """Take the next parts."""
        for part in parts:
            if isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, CallBegun):
                self.calls.append(ToolCall(part.name, ""))
            else:
                call = self.calls[part.index]
                self.calls[part.index] = ToolCall(call.name, call.arguments + part.text)


class ReplyParser:
    """Takes a reply's text piece by piece and returns the parts that became certain.

    However the text is split, the parts put together are the same. `syntax` and `tools` (the
    schemas of the arguments by name) define a tool call; without a syntax all is content.
    With `think`, the text between these tags at the reply's beginning is reasoning; `thinking`:
    the prompt ends with the first of them. After `most_calls` calls the reply is `done`, and the
    rest is left out.
    """

    def __init__(
        self,
        syntax: ToolSyntax | None = None,
        tools: Mapping[str, Any] | None = None,
        *,
        think: ThinkTags | None = None,
        thinking: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self.done = False
        self._reader = Reader(tools or {}, most_calls)
        self._reading = _read_reply(self._reader, syntax, think, thinking)
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain with the next piece of text."""
        for character in text:
            self._send(character)
        return self._taken()

    def finish(self) -> list[Part]:
        """Return the parts that were held back: the text has ended."""
        self._send("")
        return self._taken()

    def _send(self, character: str) -> None:
        if self.done:
            return
        try:
            self._reading.send(character)
        except (StopIteration, EnoughError):
            self.done = True

    def _taken(self) -> list[Part]:
        parts, self._reader.parts = self._reader.parts, []
        return merged(parts)


def _read_reply(
    reader: Reader, syntax: ToolSyntax | None, think: ThinkTags | None, thinking: bool
) -> Reading[None]:
    if think is not None:
        yield from _read_reasoning(reader, think, thinking)
    if syntax is not None and reader.tools:
        yield from syntax.read(reader)
    yield from reader.until(())


def _read_reasoning(reader: Reader, tags: ThinkTags, thinking: bool) -> Reading[None]:
    """Give out the text before the closing tag, without the white space at its borders."""
    first, last = tags
    if not thinking and not (yield from reader.follows(first)):
        return
    reader.back((yield from reader.after_blank()))
    yield from reader.until((last,), Reasoning)
    reader.release()
    reader.back((yield from reader.after_blank()))
