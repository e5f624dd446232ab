"""Grammars (JSON schema, regular expression, GBNF, Lark) that an answer has to follow.

This is the user's wish. `compile` makes it ready for decoding, with llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specrun.bindings.errors import OptionError

GrammarKind = Literal["json-schema", "gbnf", "lark", "regex"]

_NOUNS = {
    "json-schema": "JSON schema",
    "gbnf": "GBNF grammar",
    "lark": "Lark grammar",
    "regex": "regular expression",
}
_LONGEST = 8 << 20  # characters: above it, reading alone would hold up everybody else


class GrammarError(OptionError):
    """A grammar cannot be compiled, or a text under it became too complex to follow."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer; make it by `json_schema`, `gbnf`, `lark` or `regex`.

    With `after`, the grammar begins only behind the first place where the answer has this text,
    such as "</think>", which may stand within a token; before it anything is allowed, also the end
    of the text. Raises `GrammarError` for a text that cannot be a grammar of its kind; the
    compiler's errors come once there is a vocabulary (`Session.stream`).
    """

    kind: GrammarKind
    source: str = field(repr=False)
    after: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _NOUNS:
            raise GrammarError(f"{self.kind!r} is no kind of grammar: give {', '.join(_NOUNS)}")
        for name, value in (("grammar", self.source), ("after", self.after)):
            if not isinstance(value, str):
                raise GrammarError(f"{name} is {type(value).__name__}: it must be a text")
        if not self.source.strip():
            raise GrammarError(f"the {self.noun} is empty: give one, or none")
        if len(self.source) > _LONGEST:
            size = f"{len(self.source):,} characters"
            raise GrammarError(f"the {self.noun} has {size}: {_LONGEST:,} are the most")

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool | str, *, after: str = "") -> Grammar:
        """Return the grammar of the JSON values that a schema allows; a text is read as JSON.

        Keys come in the order of the schema's `properties`; between JSON's tokens there is nothing,
        a space, or one or two line breaks and at most 20 spaces or tabs.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as problem:
                raise GrammarError(f"the JSON schema is no JSON: {problem}") from None
        if not isinstance(schema, Mapping | bool):
            kind = type(schema).__name__
            raise GrammarError(f"the JSON schema is a {kind}: it must be an object, true or false")
        try:
            return Grammar("json-schema", json.dumps(schema), after)
        except (TypeError, ValueError, RecursionError) as problem:
            raise GrammarError(f"the JSON schema cannot be written as JSON: {problem}") from None

    @staticmethod
    def json_object(*, after: str = "") -> Grammar:
        """Return the grammar of any JSON object."""
        return Grammar.json_schema({"type": "object"}, after=after)

    @staticmethod
    def gbnf(source: str, *, after: str = "") -> Grammar:
        """Return a grammar in llama.cpp's notation, which begins with its rule `root`."""
        return Grammar("gbnf", source, after)

    @staticmethod
    def lark(source: str, *, after: str = "") -> Grammar:
        """Return a grammar in llguidance's dialect of Lark, which begins with its rule `start`."""
        return Grammar("lark", source, after)

    @staticmethod
    def regex(pattern: str, *, after: str = "") -> Grammar:
        """Return the grammar of the texts that a regular expression matches as a whole."""
        return Grammar("regex", pattern, after)

    @property
    def schema(self) -> Any:  # noqa: ANN401 - of JSON
        """The JSON schema; None for a grammar of another kind."""
        return json.loads(self.source) if self.kind == "json-schema" else None

    @property
    def noun(self) -> str:
        """Its name in messages."""
        return _NOUNS[self.kind]
