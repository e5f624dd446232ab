"""Prompts of conversations, replies of models, and grammars of calls that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.chat import ChatTemplate, ChatText, ChatTurn, Reply, ReplyParser, ToolSyntax
from specrun.runtime.grammar import Grammar
from specrun.runtime.grammar.compiled import compiled


def chat_text(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    messages: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any] | None = None,
    n_ctx: int | None = None,
    **fields: Any,
) -> ChatText:
    """Return the prompt of a conversation, with further fields of its turn."""
    return ChatTurn(messages, **fields).text(template, vocabulary, variables, n_ctx)


def read_reply(
    syntax: ToolSyntax | None,
    pieces: Sequence[str],
    tools: Mapping[str, Any],
    *,
    is_cut: bool = False,
    **options: Any,
) -> Reply:
    """Return what the pieces of a text are together."""
    parser, reply = ReplyParser(syntax, tools, **options), Reply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish(is_cut=is_cut))
    return reply


def follows(vocabulary: Vocabulary, grammar: Grammar, text: str, *, marks: bool = False) -> bool:
    """Whether a text, to its end, is one of the grammar's; `marks` may be control tokens."""
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=marks)
    state = compiled(grammar, vocabulary).start(0)
    try:
        for token in [*tokens, min(vocabulary.end_of_generation)]:
            if not state.allows(token):
                return False
            state = state.after([token])
    except OptionError:
        return False
    return True
