"""Grammars of requests: OpenAI's response_format, llama-server's grammar and json_schema."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from specrun.bindings.errors import ClosedError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.body import Fields
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.http.server import GRAMMARS
from specrun.cli.serve.tools.plan import ReplyPlan
from specrun.runtime.grammar import Grammar, GrammarError
from specrun.runtime.grammar.compiled import compiled

_FIELDS = ("response_format", "grammar", "json_schema")
_FORMATS = "one of text, json_object and json_schema"


def asks_for_text(fields: Fields) -> bool:
    """Whether a request says itself how its text is bound: then the server's grammar is not."""
    return any(name in fields for name in _FIELDS)


def read_grammar(fields: Fields) -> Grammar | None:
    """Return what the text of an answer is bound to, None for any text.

    Raises `RequestError` that names the field, also where two fields ask for something.
    """
    found: dict[str, Grammar] = {}
    form = fields.fields("response_format")
    if form is not None:
        grammar = read_format(form)
        if grammar is not None:
            found["response_format"] = grammar
    schema = fields.get("json_schema")
    if schema not in (None, ""):
        found["json_schema"] = _of_schema(schema, "json_schema")
    text = fields.text("grammar")
    if text:
        found["grammar"] = _written(text)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RequestError(f"{first} and {second} both bind the text: give one of them", second)
    return next(iter(found.values()), None)


def read_format(form: Fields) -> Grammar | None:
    """Return what {"type": "json_schema", "json_schema": {"schema": {...}}} asks for.

    The schema may also stand beside the type, as in the Responses API and llama-server's
    {"type": "json_object", "schema": {...}}. `form.where` is the field and a dot.
    """
    kind, field = form.text("type"), form.where.removesuffix(".")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise form.wrong("type", _FORMATS)
    within = form.fields("json_schema")
    schema = form.get("schema") if within is None else within.get("schema")
    if schema is None and kind == "json_schema":
        raise RequestError(f"{field} has no schema: give one, or the type json_object", field)
    return Grammar.json_object() if schema is None else _of_schema(schema, field)


def _of_schema(schema: object, field: str) -> Grammar:
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{field}: the schema must be a JSON object, true or false", field)
    try:
        return Grammar.json_schema(schema)
    except GrammarError as error:
        raise RequestError(f"{field}: {error}", field) from None


def _written(text: str) -> Grammar:
    """Return a grammar in GBNF, or in Lark where it begins as llama.cpp has it."""
    try:
        is_lark = text.lstrip().startswith("%llguidance")
        return Grammar.lark(text) if is_lark else Grammar.gbnf(text)
    except GrammarError as error:
        raise RequestError(f"grammar: {error}", "grammar") from None


async def bound_text(
    asked: Grammar | None,
    plan: ReplyPlan,
    vocabulary: Vocabulary,
    prompt_end: str,
    is_closing: Callable[[], bool],
) -> Grammar | None:
    """Return the grammar of a reply, compiled aside, where nobody waits for it.

    That of calls that have to come, or what was `asked` for; behind the reasoning, where the prompt
    has opened one. Raises `RequestError` where both are, and for what cannot be compiled.
    """
    calls = plan.grammar(vocabulary, prompt_end)
    if calls is not None and asked is not None:
        problem = "tool_choice or strict tools bind the text, and so does the grammar or format"
        raise RequestError(f"{problem}: give one of them", "tool_choice")
    grammar = asked if calls is None else calls
    if grammar is None:
        return None
    if calls is None and plan.think is not None and plan.thinks_already(prompt_end):
        grammar = dataclasses.replace(grammar, after=plan.think[1])
    gone = threading.Event()

    def is_wanted() -> bool:
        return not (gone.is_set() or is_closing())

    try:
        await GRAMMARS.run(lambda: compiled(grammar, vocabulary, is_wanted))
    except ClosedError:
        raise ClosedError("the server is shutting down") from None
    except GrammarError as error:
        if calls is not None:
            raise RequestError(
                f"a call of these tools cannot be forced: {error}", "tools"
            ) from None
        field = "response_format" if grammar.kind == "json-schema" else "grammar"
        raise RequestError(f"{field}: {error}", field) from None
    finally:
        gone.set()
    return grammar
