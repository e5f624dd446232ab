"""Grammars of replies, compiled beside the event loop: of calls, and of a text that is bound."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from specrun.bindings.errors import ClosedError, OptionError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.lanes import GRAMMARS, REQUESTS
from specrun.runtime.chat import ReplyPlan
from specrun.runtime.grammar import Grammar, GrammarError, warn_once
from specrun.runtime.grammar.compiled import compiled

_MOST_FAULTS = 256


class GrammarReader:
    """Makes the grammars of replies for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, is_closing: Callable[[], bool]) -> None:
        self._vocabulary, self._is_closing = vocabulary, is_closing
        self._faults: dict[Grammar, str] = {}  # of tools: clients send them with every request

    async def of_reply(
        self, plan: ReplyPlan, asked: Grammar | None, prompt_end: str
    ) -> Grammar | None:
        """Return the grammar of a reply, compiled; None for any text: see `reply_grammar`.

        Raises `RequestError` if another grammar and calls both bind the text, or if one cannot be
        compiled.
        """

        def of(plan: ReplyPlan) -> Grammar | None:
            return plan.reply_grammar(self._vocabulary, prompt_end, asked)

        try:
            reply = await REQUESTS.run(lambda: of(plan))
        except GrammarError:
            raise
        except OptionError as error:
            raise RequestError(str(error), "tool_choice") from None
        if reply is None:
            return None
        if asked is not None and reply.source == asked.source:
            return await self._requested(reply)
        try:
            return await self._without_fault(reply)
        except GrammarError as error:
            if asked is not None and not plan.must_call:
                await self._requested(asked)  # the fault may be its own
            loosened = await self._without_faults(plan, error)
        again = await REQUESTS.run(lambda: of(loosened))
        assert again is not None
        try:
            return await self._compiled(again)
        except GrammarError as error:
            raise _unforced(error) from None

    async def _requested(self, asked: Grammar) -> Grammar:
        try:
            return await self._compiled(asked)
        except GrammarError as error:
            field = "response_format" if asked.kind == "json-schema" else "grammar"
            raise RequestError(f"{field}: {error}", field) from None

    async def _without_faults(self, plan: ReplyPlan, error: GrammarError) -> ReplyPlan:
        """Return the plan without the schemas that cannot be compiled: others may be called.

        Raises `RequestError` if the fault is in none of them, or in all that may be called.
        """
        schemas: dict[str, Any] = {}
        for name, schema in plan.schemas.items():
            fields = schema if isinstance(schema, dict) else {}
            try:
                await self._without_fault(Grammar.json_schema({"type": "object", **fields}))
            except GrammarError as fault:
                warn_once(f"calls of {name} do not follow its schema: {fault}")
                schemas[name] = _unbound(fields)
        if not schemas or (plan.must_call and len(schemas) == len(plan.schemas)):
            raise _unforced(error)
        return dataclasses.replace(plan, schemas={**plan.schemas, **schemas})

    async def _without_fault(self, grammar: Grammar) -> Grammar:
        """Compile a grammar unless that failed before; raises `GrammarError`."""
        if (known := self._faults.get(grammar)) is not None:
            raise GrammarError(known)
        try:
            return await self._compiled(grammar)
        except GrammarError as error:
            self._faults[grammar] = str(error)
            if len(self._faults) > _MOST_FAULTS:
                del self._faults[next(iter(self._faults))]
            raise

    async def _compiled(self, grammar: Grammar) -> Grammar:
        gone = threading.Event()

        def is_wanted() -> bool:
            return not (gone.is_set() or self._is_closing())

        try:
            await GRAMMARS.run(lambda: compiled(grammar, self._vocabulary, is_wanted))
        except ClosedError:
            raise ClosedError("the server is shutting down") from None
        finally:
            gone.set()
        return grammar


def _unforced(error: GrammarError) -> RequestError:
    return RequestError(f"a call of these tools cannot be forced: {error}", "tools")


def _unbound(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with the same names, whose values are free."""
    properties, required = schema.get("properties"), schema.get("required")
    free: dict[str, Any] = {}
    for name, value in properties.items() if isinstance(properties, dict) else ():
        is_text = isinstance(value, dict) and value.get("type") == "string"
        free[name] = {"type": "string"} if is_text else {}
    names = required if isinstance(required, list) else []
    named = [name for name in names if isinstance(name, str) and name in free]
    return {"type": "object", "properties": free, "required": named}
