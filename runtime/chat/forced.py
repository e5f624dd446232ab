"""Grammars of calls that have to come, in the form of the model's family.

The grammars are in llguidance's dialect of Lark. Arguments have the spaces that templates write,
so that all of a call's frame is forced, and drafted for nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specrun.runtime.chat.syntax import ArgumentForm, CallForm, ThinkTags
from specrun.runtime.chat.values import kinds_of, takes_text
from specrun.runtime.grammar import SPACES, any_of, followed
from specrun.runtime.grammar.references import properties_of

_SPACES = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_BLANK = "/[ \\n]*/"
_REPLY = "schema of a reply"
_PLACEHOLDERS = {"{index}": "/[0-9]+/", "{number}": "/[1-9][0-9]*/", "{id}": "/[a-zA-Z0-9]{9}/"}


@dataclass(slots=True)
class ForcedCalls:
    """The calls that are required: one of these tools, or several if the form has a separator.

    With `may_talk` none is required: text may surround calls, but a text that begins as a call is
    one. With `answer` a text by this schema may come instead, and without a form or schemas alone.
    `control` are ids of marks that are control tokens, which a grammar names by id.
    """

    form: CallForm | None
    schemas: Mapping[str, Any]
    control: Mapping[str, int]
    several: bool = False
    may_talk: bool = False
    answer: Any = None
    _rules: list[str] = field(default_factory=list)

    def grammar(self, think: ThinkTags | None = None, *, thinking: bool = False) -> str:
        """Return the grammar; before the calls the model may think, and must end its reasoning.

        `thinking`: the prompt opened the reasoning already.
        """
        self._rules.clear()
        start = self.add("reply", self._reply())
        if think is not None:
            thought = f"{self.until(think.last)} {_BLANK} {self.text(think.follow)}"
            whole = f"{self.text(think.first)} {thought}"
            start = f"{thought} {start}" if thinking else f"({whole})? {start}"
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _reply(self) -> str:
        form = self.form
        if self.answer is None:
            assert form is not None
            return self._talk(form) if self.may_talk else self._calls(form.with_lead)
        if form is None:
            return self.json(self.answer, SPACES)
        answer = f"{self.text(form.answer)} {self.json(self.answer, SPACES)}"
        if not self.schemas:
            return answer
        is_json = not (form.mark or form.keywords)
        if not is_json or not f"{form.before_all}{form.before_name}".startswith(("{", "[")):
            return f"{self._calls(form.with_lead)} | {answer}"
        # Both begin with a bracket: one schema has them, so that they share their beginnings.
        calls = [_call_schema(form, name, schema) for name, schema in self.schemas.items()]
        texts = self.json(any_of([followed(self.answer, _REPLY, {}), *calls]), SPACES)
        if form.tag not in self.control:
            return texts
        return f"{self.text(form.tag)} {self.json(any_of(calls), SPACES)} | {texts}"

    def _calls(self, form: CallForm) -> str:
        heads: list[tuple[str, str]] = []
        for name, schema in self.schemas.items():
            fields = schema if isinstance(schema, dict) else {}
            if form.argument is not None:
                arguments = _tags(self, form.argument, _with_definitions(fields))
            elif form.keywords:
                arguments = _pairs(self, _with_definitions(fields), (", ", "="), self.json)
            elif form.quote:
                arguments = _quoted(self, {"type": "object", **fields}, form.quote)
            else:
                arguments = self.json({"type": "object", **fields})
            rest = self.add_new(f"{arguments} {self.text(form.behind)}")
            heads.append((form.before_name + name + form.before_arguments, rest))

        def any_call(before: str) -> str:
            # One text with its prefix: the lexer cannot go back behind a line break.
            return " | ".join(f"{self.text(before + head)} {rest}" for head, rest in heads)

        many = self.add("call", any_call(form.before_all))
        if self.several and form.separator is not None:
            many += f" ({self.add('next_call', any_call(form.separator))})*"
        return f"{many} {self.text(form.behind_all)}"

    def _talk(self, form: CallForm) -> str:
        """Return text and calls: behind a mark, or instead of a text that begins as a call."""
        calls = self.add("calls", self._calls(form.behind_mark))
        if not form.mark:
            tag = f"({self.text(form.tag)})?" if form.tag in self.control else ""
            before, behind = form.before_all + form.before_name, form.before_arguments
            heads = "|".join(_escaped(before + name + behind) for name in self.schemas)
            text = f"/\\s*([^\\s{{](?s:.*))?/ & ~/\\s*({heads})(?s:.*)/"
            return f"{self.add('TEXT', text)} | {tag} {calls}"
        times = "*" if self.several else "?"
        return f"({self.until(form.mark)} {calls}){times} /(?s:.*)/"

    # -- rules, as they come to be needed ----------------------------------------------------------

    def add(self, name: str, body: str) -> str:
        """Add a rule; return its name."""
        self._rules.append(f"{name}: {body}")
        return name

    def add_new(self, body: str) -> str:
        """Add a rule without a name of its own; return its name."""
        return self.add(f"rule_{len(self._rules)}", body or '""')

    def text(self, text: str | None) -> str:
        """Return a text, with control tokens by their ids."""
        if not text:
            return ""
        marks = "|".join(map(re.escape, (*self.control, *_PLACEHOLDERS)))
        made: list[str] = []
        for piece in re.split(f"({marks})", text):
            if piece in self.control:
                made.append(f"<[{self.control[piece]}]>")
            elif piece:
                known = _PLACEHOLDERS.get(piece)
                made.append(json.dumps(piece, ensure_ascii=False) if known is None else known)
        return " ".join(made)

    def json(self, schema: Any, spaces: Mapping[str, Any] = _SPACES) -> str:  # noqa: ANN401
        """Return a rule of the JSON values of a schema."""
        source = json.dumps(followed(schema, _REPLY, spaces))
        return self.add(f"json_{len(self._rules)}", f"%json {source}")

    def until(self, mark: str) -> str:
        """Return a rule of any text up to a mark, and the mark."""
        if any(mark.startswith(each) for each in self.control):
            return f"/(?s:.*)/ {self.text(mark)}"
        name = f"until_{len(self._rules)}"
        self.add(f"{name}[lazy]", f"/(?s:.*){_escaped(mark)}/")
        return name


def _call_schema(form: CallForm, name: str, schema: object) -> Mapping[str, Any]:
    """Return the schema of a call that is a JSON object: of its name, and then its arguments."""
    call = f"{form.before_name}{name}{form.before_arguments}{{}}{form.behind}"
    frame = json.loads(f"{form.before_all}{call}{form.behind_all}")
    fields = schema if isinstance(schema, dict) else {}
    arguments = followed({"type": "object", **fields}, _REPLY, {})
    definitions = arguments.pop("$defs", {})

    def fixed(value: object) -> dict[str, Any]:
        if value == {}:
            return arguments
        if isinstance(value, list):
            return {"type": "array", "items": fixed(value[0]), "minItems": 1}
        if not isinstance(value, dict):
            return {"const": value}
        inner = {key: fixed(each) for key, each in value.items()}
        return {
            "type": "object",
            "properties": inner,
            "required": [*inner],
            "additionalProperties": False,
        }

    return {**fixed(frame), "$defs": definitions}


def _escaped(text: str) -> str:
    """Return a text as a part of a regular expression of the grammar's."""
    return "\\n".join(map(re.escape, text.split("\n"))).replace("/", "\\/")


def _tagged(rules: ForcedCalls, schema: object, closing: str) -> str:
    """Return an argument and its closing tag: texts unchanged, all else as JSON."""
    fields = schema if isinstance(schema, dict) else {}
    if not takes_text(schema):
        return f"{rules.json(fields)} {rules.text(closing)}"
    if "enum" not in fields:
        return rules.until(closing)
    values = " | ".join(rules.text(str(value)) for value in fields["enum"])
    return f"({values}) {rules.text(closing)}"


def _with_definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose properties have its definitions: each is a text of its own."""
    properties = properties_of(schema)
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if not (shared and properties):
        return schema
    alone = {
        name: {**value, **shared} if isinstance(value, dict) else value
        for name, value in properties.items()
    }
    return {**schema, "properties": alone}


def _tags(rules: ForcedCalls, form: ArgumentForm, schema: Mapping[str, Any]) -> str:
    """Return the tags of the arguments, in the schema's order; optional ones may be left out."""
    tags: list[str] = []
    for key, value, is_required in _members(schema):
        closing = form.behind.replace("{key}", key)
        tag = rules.text(form.before + key + form.lead(value)) + " "
        tag += _tagged(rules, value, closing)
        tags.append(tag if is_required else f"({tag})?")
    return " ".join(tags)


def _members(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return a schema's properties, and whether they are required."""
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return [(key, value, key in names) for key, value in properties_of(schema).items()]


def _pairs(
    rules: ForcedCalls,
    schema: Mapping[str, Any],
    marks: tuple[str, str],
    value_of: Callable[[Mapping[str, Any]], str],
) -> str:
    """Return pairs of names and values with marks between; optional ones may be left out.

    From the last one: the forms after another pair, and those of the first.
    """
    comma, assign = (rules.text(mark) for mark in marks)
    behind = first = ""
    for key, value, is_required in reversed(_members(schema)):
        own = value_of(value if isinstance(value, dict) else {})
        pair = rules.add_new(f"{rules.text(key)} {assign} {own}")
        begun = f"{pair} {behind}"
        if is_required:
            first, behind = begun, f"{comma} {begun}"
        else:
            first = f"{begun} | {first}" if first else f"({begun})?"
            behind = f"({comma} {pair})? {behind}"
        first, behind = rules.add_new(first), rules.add_new(behind)
    return first


_ANY_DEPTH = 8


def _quoted(rules: ForcedCalls, schema: Mapping[str, Any], quote: str, depth: int = 0) -> str:
    """Return values whose texts stand between quote marks, and whose keys have none."""
    if depth == _ANY_DEPTH:
        schema = {}

    def inner(each: Mapping[str, Any]) -> str:
        return _quoted(rules, each, quote, depth + 1)

    text = f"{rules.text(quote)} {rules.until(quote)}"
    if isinstance(schema.get("enum"), list):
        each = (
            rules.text(f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value))
            for value in schema["enum"]
        )
        return f"({' | '.join(each)})"
    forms = {
        "string": text,
        "integer": "/-?(0|[1-9][0-9]*)/",
        "number": "/-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?/",
        "boolean": '("true" | "false")',
        "null": '"null"',
    }
    kinds = sorted(kinds_of(schema)) or [*forms]
    choices = [forms[kind] for kind in kinds if kind in forms]
    if "array" in kinds:
        items = schema.get("items")
        item = rules.add_new(inner(items if isinstance(items, dict) else {}))
        choices.append(f'"[" ({item} ("," {item})*)? "]"')
    if "object" in kinds:
        choices.append(f'"{{" {_pairs(rules, schema, (",", ":"), inner)} "}}"')
    return f"({' | '.join(choices)})"
