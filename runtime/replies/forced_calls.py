"""Grammars of tool calls: a reply has to be calls as its family writes them, or may have them.

The grammars are in llguidance's dialect of Lark. Arguments have the spaces that templates write, so
that all of a call's frame is forced, and drafted for nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specrun.runtime.replies.call_syntaxes import takes_text

_SPACES = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_LINE = "\n"
_BLANK = "/[ \\n]*/"


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around calls: before and behind all, each, its name and its arguments.

    The first of them begins with `mark`, where there is one; a call without one may stand behind a
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
        """What is left of the form behind a mark."""
        if self.before_all:
            return replace(self, before_all=self.before_all.removeprefix(self.mark))
        # Each call has a mark of its own.
        return replace(self, before_name=self.before_name.removeprefix(self.mark), separator=None)


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """What has to be called: one of these tools, or several where the form has a separator.

    With `may_talk` nothing has to: text may stand around calls, but what begins as a call is one.
    `control` are ids of marks that are control tokens, of which a grammar speaks by id.
    """

    form: CallForm
    schemas: Mapping[str, Any]
    control: Mapping[str, int]
    several: bool = False
    may_talk: bool = False

    def grammar(self, think: tuple[str, str] | None = None, *, thinking: bool = False) -> str:
        """Return the grammar; before the calls the model may think, and has to end what it began.

        `thinking` says that the prompt opened the reasoning already.
        """
        rules = _Rules(self.control)
        start = self._talk(rules) if self.may_talk else self._calls(rules, self.form)
        if think is not None:
            thought = rules.until(think[1]) + f" {_BLANK}"
            whole = f"{rules.text(think[0])} {thought}"
            start = f"{thought} {start}" if thinking else f"({whole})? {start}"
        return rules.source(start)

    def _calls(self, rules: _Rules, form: CallForm) -> str:
        calls = [self._call(rules, form, name, schema) for name, schema in self.schemas.items()]
        rules.add("call", " | ".join(calls))
        many = "call"
        if self.several and form.separator is not None:
            many = f"call ({rules.text(form.separator)} call)*"
        return f"{rules.text(form.before_all)} {many} {rules.text(form.behind_all)}"

    def _talk(self, rules: _Rules) -> str:
        """Return text and calls: behind a mark, or instead of a text that begins with a bracket."""
        calls = rules.add("calls", self._calls(rules, self.form.behind_mark))
        if not self.form.mark:
            tag = f"({rules.text(self.form.tag)})?" if self.form.tag in self.control else ""
            return f"/\\s*([^\\s{{](?s:.*))?/ | {tag} {calls}"
        times = "*" if self.several else "?"
        return f"({rules.until(self.form.mark)} {calls}){times} /(?s:.*)/"

    def _call(self, rules: _Rules, form: CallForm, name: str, schema: object) -> str:
        fields = schema if isinstance(schema, dict) else {}
        arguments = (
            _tags(rules, fields) if form.tagged else rules.json({"type": "object", **fields})
        )
        before = rules.text(form.before_name + name + form.before_arguments)
        return f"{before} {arguments} {rules.text(form.behind)}"


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
        """Return a text, in which control tokens stand by their ids."""
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

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule of the JSON values of a schema."""
        options = schema.get("x-guidance")
        spaced = {**_SPACES, **options} if isinstance(options, dict) else _SPACES
        source = json.dumps({**schema, "x-guidance": spaced})
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
    """Return an argument and its closing tag: texts stand as they are, all else as JSON."""
    fields, closing = schema if isinstance(schema, dict) else {}, "\n</parameter>\n"
    if not takes_text(schema):
        return f"{rules.json(fields)} {rules.text(closing)}"
    if "enum" not in fields:
        return rules.until(closing)
    values = " | ".join(rules.text(str(value)) for value in fields["enum"])
    return f"({values}) {rules.text(closing)}"


def _tags(rules: _Rules, schema: Mapping[str, Any]) -> str:
    """Return the tags of the arguments, in the schema's order; optional ones may be left out."""
    properties, required = schema.get("properties"), schema.get("required")
    tags: list[str] = []
    for key, value in (properties if isinstance(properties, dict) else {}).items():
        tag = f"{rules.text(f'<parameter={key}>{_LINE}')} {_tagged(rules, value)}"
        is_required = isinstance(required, list) and key in required
        tags.append(tag if is_required else f"({tag})?")
    return " ".join(tags)
