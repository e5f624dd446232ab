"""Plan of a reply: the tools that it may call, their syntax, and the marks of its reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.chat import Content, ForcedCalls, Part, ReplyParser, ThinkTags, ToolSyntax
from specrun.runtime.grammar import Grammar
from specrun.runtime.round import TokenEvent


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
