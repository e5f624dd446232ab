"""How a family of models writes reasoning and calls: the columns of the table of families."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from specrun.runtime.chat.reader import Reader, Reading
from specrun.runtime.chat.values import kinds_of, takes_text

# A call is an object of JSON with its name within (`object`), a name and an object of JSON
# (`named`), a name and a tag for each argument (`tags`), or a call of Python (`keywords`).
CallKind = Literal["object", "named", "tags", "keywords"]


class ThinkTags(NamedTuple):
    """The marks around a model's reasoning.

    `around` are marks around the answer behind it, which are no content; `follow` is the text
    between the model's reasoning and a call. `anywhere`: reasoning may come again, behind content.
    """

    first: str
    last: str
    around: tuple[str, ...] = ()
    follow: str = ""
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """The texts around an argument's name and its value; `{type}` in them is its JSON type.

    `between_json` is the one before values that are no texts, if that differs. `{key}` in `behind`
    is the argument's name.
    """

    before: str
    between: str
    behind: str
    between_json: str = ""

    @property
    def value_mark(self) -> str:
        """The end of the text before a value."""
        found = re.search(r"(<[^<>]*)?>\s*$", self.between)
        assert found is not None
        return found[0].strip()

    def lead(self, schema: object) -> str:
        """Return the text between the name and a value of a schema."""
        if not self.between_json or takes_text(schema):
            return self.between
        kinds = kinds_of(schema) or {"object"}
        kind = min(kinds).replace("integer", "number")
        return self.between_json.replace("{type}", kind)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around calls: before and behind all, each, its name and its arguments.

    The first of them begins with `mark`, if there is one; a call without one may follow a
    `tag`. `argument` is the form of arguments that are tags; `quote` stands around texts of
    arguments that are no JSON. Without a `separator` there is one call a turn. `{index}` and
    `{number}` stand for a call's number from 0 and from 1, `{id}` for nine letters and digits.
    `lead` is before all if nothing else was written before, `answer` before a text instead.
    """

    before_name: str
    before_arguments: str
    behind: str = ""
    before_all: str = ""
    behind_all: str = ""
    separator: str | None = None
    argument: ArgumentForm | None = None
    keywords: bool = False
    quote: str = ""
    mark: str = ""
    tag: str = ""
    lead: str = ""
    answer: str = ""

    @property
    def with_lead(self) -> CallForm:
        """The form of a reply that is nothing but calls."""
        return replace(self, before_all=self.lead + self.before_all)

    @property
    def behind_mark(self) -> CallForm:
        """The rest of the form behind a mark."""
        if self.before_all:
            return replace(self, before_all=self.before_all.removeprefix(self.mark))
        # Each call has a mark of its own.
        return replace(self, before_name=self.before_name.removeprefix(self.mark), separator=None)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return calls, names and arguments, as the model writes them."""
        separator = "" if self.separator is None else self.separator
        each: list[str] = []
        for index, (name, arguments) in enumerate(calls):
            counts = {"{index}": str(index), "{number}": str(index + 1), "{id}": f"{index:09}"}
            before, between = self.before_name, self.before_arguments
            for placeholder, count in counts.items():
                before = before.replace(placeholder, count)
                between = between.replace(placeholder, count)
            each.append(f"{before}{name}{between}{self._arguments(arguments)}{self.behind}")
        return self.lead + self.before_all + separator.join(each) + self.behind_all

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.keywords:
            return ", ".join(f"{key}={_json(value)}" for key, value in arguments.items())
        if self.quote:
            return _quoted(arguments, self.quote)
        if self.argument is None:
            return _json(arguments)
        text = ""
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            lead = self.argument.lead({"const": value})
            behind = self.argument.behind.replace("{key}", key)
            text += f"{self.argument.before}{key}{lead}{value if is_text else _json(value)}{behind}"
        return text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quoted(value: object, quote: str) -> str:
    """Return a value whose texts stand between quote marks, with keys that have none."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_quoted(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_quoted(each, quote) for each in value) + "]"
    return _json(value)


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family writes tool calls: a row of the table of families.

    A chat template whose text has all of one group of `known_by` is of the family. A call begins
    with one of `openers`, which one of `sections` may precede; `closers` end it, and are no
    content; `others` are further marks. `at_start`: a call may also be the reply's begin, without a
    mark. `begins` are texts that begin an answer, and `around` marks that stand around one: neither
    is content. `head` are the texts between the opener and the arguments, with the name. `read`
    reads replies that are messages as a whole; an answer may be the text of `answer_key` in an
    object. `id_length` is the number of letters and digits of an id in the family's templates, None
    if any number will do; `numbered_ids`: ids have the name and the call's number.
    """

    name: str
    known_by: tuple[tuple[str, ...], ...]
    kind: CallKind
    form: CallForm
    openers: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    at_start: bool = False
    head: re.Pattern[str] | None = None
    read: Callable[[Reader, ToolSyntax], Reading[None]] | None = None
    answer_key: str = ""
    id_length: int | None = None
    numbered_ids: bool = False

    @property
    def tells_answers(self) -> bool:
        """Whether an answer has marks of the family, with and without tools."""
        return bool(self.read is not None or self.begins or self.form.answer)

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in which a vocabulary of the family may have control tokens."""
        form, tags = self.form, self.form.argument
        texts = [*self.openers, *self.sections, *self.closers, *self.others, *self.around]
        texts += [form.before_all, form.before_name, form.before_arguments, form.behind]
        texts += [form.lead, form.answer]
        texts += [] if tags is None else [tags.before, tags.between, tags.behind]
        return tuple(dict.fromkeys(mark for text in texts for mark in text.split()))

    def new_id(self) -> str:
        """Return an id for a call."""
        letters = string.ascii_letters + string.digits
        made = "".join(secrets.choice(letters) for _ in range(self.id_length or 24))
        return f"call_{made}" if self.id_length is None else made
