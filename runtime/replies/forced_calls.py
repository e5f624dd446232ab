"""Grammars of forced tool calls: a reply has to be one call, or several, as its family writes them.

The grammars are in llguidance's dialect of Lark. Arguments have the spaces that templates write, so
that all of a call's frame is forced, and drafted for nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SPACES = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_BLANK = "/[ \\n]*/"


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around calls: before and behind all, each, its name and its arguments.

    `tagged` arguments are tags instead of a JSON object.
    """

    before_name: str
    before_arguments: str
    behind: str = ""
    before_all: str = ""
    behind_all: str = ""
    separator: str | None = None
    tagged: bool = False


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """What has to be called: one of these tools, or several where the form has a separator.

    `control` are ids of marks that are control tokens, of which a grammar speaks by id.
    """

    form: CallForm
    schemas: Mapping[str, Any]
    control: Mapping[str, int]
    several: bool = False

    def grammar(self, think: tuple[str, str] | None = None, *, thinking: bool = False) -> str:
        """Return the grammar; before the calls the model may think, and has to end what it began.

        `thinking` says that the prompt opened the reasoning already.
        """
        form, rules = self.form, _Rules(self.control)
        calls = [self._call(rules, name, schema) for name, schema in self.schemas.items()]
        rules.add("call", " | ".join(calls))
        many = "call"
        if self.several and form.separator is not None:
            many = f"call ({rules.text(form.separator)} call)*"
        start = f"{rules.text(form.before_all)} {many} {rules.text(form.behind_all)}"
        if think is not None:
            thought = rules.until(think[1]) + f" {_BLANK}"
            whole = f"{rules.text(think[0])} {thought}"
            start = f"{thought} {start}" if thinking else f"({whole})? {start}"
        return rules.source(start)

    def _call(self, rules: _Rules, name: str, schema: object) -> str:
        form = self.form
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


def _tags(rules: _Rules, schema: Mapping[str, Any]) -> str:
    """Return the tags of the arguments, in the schema's order; optional ones may be left out."""
    properties, required = schema.get("properties"), schema.get("required")
    tags: list[str] = []
    for key, value in (properties if isinstance(properties, dict) else {}).items():
        opening = rules.text(f"<parameter={key}>\n")
        is_text = isinstance(value, dict) and value.get("type") == "string" and "enum" not in value
        closing = "\n</parameter>\n"
        if is_text:
            tag = f"{opening} {rules.until(closing)}"
        else:
            tag = f"{opening} {rules.json(value if isinstance(value, dict) else {})} " + rules.text(
                closing
            )
        is_required = isinstance(required, list) and key in required
        tags.append(tag if is_required else f"({tag})?")
    return " ".join(tags)
