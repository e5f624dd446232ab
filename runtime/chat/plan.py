"""The plan of a reply: the forms that it may have, its readers, and the grammar that binds it."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import OptionError
from specrun.runtime.chat.forced import ForcedCalls
from specrun.runtime.chat.reply import Reply, ReplyParser, Thoughts
from specrun.runtime.chat.syntax import ThinkTags, ToolSyntax
from specrun.runtime.grammar import Grammar

if TYPE_CHECKING:
    from specrun.bindings.models import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """The forms that a reply may have in addition to content; by default none.

    `schemas` are those of the arguments, by the names of the tools that may be called. With
    `must_call` the reply is nothing but calls, behind its reasoning; calls of `strict` tools follow
    their schemas wherever they come. `custom` are names of tools that take a text. `thoughts` is
    the place of the reasoning, and `think` the marks around it.
    """

    syntax: ToolSyntax | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    think: ThinkTags | None = None
    most_calls: int | None = None
    must_call: bool = False
    strict: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()
    thoughts: Thoughts = "apart"

    @property
    def apart(self) -> ThinkTags | None:
        """The marks of reasoning that is no content."""
        return None if self.thoughts == "content" else self.think

    def control_tokens(self, vocabulary: Vocabulary) -> dict[int, str]:
        """Return the control tokens in marks of calls and of reasoning: they have no text."""
        syntax, think = self.syntax, self.think
        marks = [] if think is None else [think.first, think.last, *think.around]
        if syntax is not None:
            marks += syntax.marks if self.schemas or syntax.read is not None else syntax.around
        tokens = (
            token
            for mark in marks
            for token in vocabulary.tokenize(mark, add_special=False, parse_special=True)
        )
        return {token: vocabulary.text(token) for token in tokens if not vocabulary.piece(token)}

    def thinks_already(self, prompt_end: str) -> bool:
        """Whether a prompt ends with the tag that opens the reasoning."""
        return self.apart is not None and prompt_end.rstrip().endswith(self.apart.first)

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
        form = None if self.syntax is None else self.syntax.form
        if form is not None and form.answer and prompt_end.rstrip().endswith(form.answer):
            form = replace(form, answer="")  # the template has begun the answer
        forced = ForcedCalls(
            form,
            schemas,
            control,
            several=self.most_calls != 1,
            may_talk=not self.must_call,
            answer=answer,
        )
        thinking = self.thinks_already(prompt_end)
        return Grammar.lark(forced.grammar(self.apart, thinking=thinking))

    def new_id(self) -> str:
        """Return an id for a call."""
        assert self.syntax is not None  # only it brings calls
        return self.syntax.new_id()


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """The reading of replies to a prompt: their plan, and how the prompt ends."""

    plan: ReplyPlan
    vocabulary: Vocabulary
    prompt_end: str = ""

    def grammar(self, asked: Grammar | None) -> Grammar | None:
        """Return the grammar of a reply whose text has to follow `asked`; None for any reply.

        It begins behind the reasoning. If tools may be called as well, it is that of their calls or
        of a text by the schema. Raises `OptionError` if another grammar and calls bind the text.
        """
        plan, schema = self.plan, None if asked is None else asked.schema
        may_be_more = plan.apart is not None or (plan.syntax is not None and bool(plan.schemas))
        reply = plan.grammar(self.vocabulary, self.prompt_end, schema if may_be_more else None)
        if asked is None or (reply is not None and schema is not None):
            return reply
        if reply is not None:
            problem = "tool_choice or strict tools bind the text, and so does the grammar"
            raise OptionError(f"{problem}: give one of them")
        if plan.apart is not None and plan.thinks_already(self.prompt_end):
            return replace(asked, after=plan.apart.last)
        return asked

    def reader(self) -> ReplyParser:
        """Return a reader of the reply; the prompt may have opened the reasoning."""
        plan = self.plan
        return ReplyParser(
            plan.syntax,
            plan.schemas,
            think=plan.think,
            thinking=plan.thinks_already(self.prompt_end),
            most_calls=plan.most_calls,
            names=plan.control_tokens(self.vocabulary),
            thoughts=plan.thoughts,
        )

    def whole(self, token_ids: Sequence[int], text: str, *, is_cut: bool = False) -> Reply:
        """Return the parts of a reply that has ended, with these tokens and this text."""
        reader, reply = self.reader(), Reply()
        decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), text
        said: list[tuple[int, str]] = []
        for token, piece in zip(token_ids, self.vocabulary.pieces(token_ids), strict=True):
            own = decoder.decode(piece)[: len(rest)]  # nothing of a stop string is text
            rest = rest[len(own) :]
            said.append((token, own))
        reply.add(reader.read(said))
        reply.add(reader.finish(rest, is_cut=is_cut))
        return reply
