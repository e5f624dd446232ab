"""Forced calls in the own form of every family: what the grammar takes is what is read."""

from __future__ import annotations

import json

import pytest
from support.replies import follows, read_reply

from specrun.runtime.chat import ForcedCalls, ThinkTags, ToolSyntax
from specrun.runtime.chat.families import FAMILIES, GENERIC, THINKING
from specrun.runtime.grammar import Grammar

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "days": {"type": "integer"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "note": {
        "type": "object",
        "properties": {
            "about": {
                "type": "object",
                "properties": {"tags": {"type": "array", "items": {"type": "string"}}},
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    },
}
PARIS = ("get_weather", {"city": 'P "a" <b>', "unit": "kelvin", "days": 2})
ROME = ("get_weather", {"city": "Rome", "days": -3})
NOTE = ("note", {"about": {"tags": ["x", "y"]}})
TABLE = [*FAMILIES, GENERIC]
IDS = [f"{k} {syntax.name}" for k, syntax in enumerate(TABLE)]


@pytest.mark.parametrize("syntax", TABLE, ids=IDS)
def test_the_grammar_of_each_family_takes_its_own_form(tool_vocabulary, syntax: ToolSyntax):
    forced = ForcedCalls(syntax.form, SCHEMAS, {}, several=True)
    grammar = Grammar.lark(forced.grammar())
    texts = [[PARIS], [ROME], [NOTE]]
    texts += [[ROME, NOTE]] if syntax.form.separator is not None else []
    for calls in texts:
        text = syntax.form.written(calls)
        assert follows(tool_vocabulary, grammar, text), text
        read = [
            (call.name, json.loads(call.arguments))
            for call in read_reply(syntax, [text], SCHEMAS).calls
        ]
        assert read == calls
    for wrong in (("get_weather", {"city": "Rome"}), ("rm", {}), ("note", {"other": 1})):
        assert not follows(tool_vocabulary, grammar, syntax.form.written([wrong]))
    assert not follows(tool_vocabulary, grammar, f"So: {syntax.form.written([ROME])}")


@pytest.mark.parametrize("think", [tags for _, tags in THINKING], ids=lambda tags: tags.first)
def test_thoughts_of_each_family_may_come_first(tool_vocabulary, think: ThinkTags):
    forced = ForcedCalls(GENERIC.form, SCHEMAS, {})
    text = GENERIC.form.written([ROME])
    thought = f"{think.first}Hm.{think.last}{think.follow}{text}"
    grammar = Grammar.lark(forced.grammar(think))
    assert follows(tool_vocabulary, grammar, thought)
    assert follows(tool_vocabulary, grammar, text)
    opened = Grammar.lark(forced.grammar(think, thinking=True))
    assert follows(tool_vocabulary, opened, thought.removeprefix(think.first))
    assert not follows(tool_vocabulary, opened, text)


@pytest.mark.parametrize("syntax", TABLE, ids=IDS)
def test_what_begins_as_a_call_of_each_family_is_one(tool_vocabulary, syntax: ToolSyntax):
    """The grammar of strict tools: text may stand around calls."""
    forced = ForcedCalls(syntax.form, SCHEMAS, {}, several=True, may_talk=True)
    grammar = Grammar.lark(forced.grammar())
    assert follows(tool_vocabulary, grammar, "It rains.")
    assert follows(tool_vocabulary, grammar, syntax.form.written([ROME]))
    if syntax.form.mark:
        for arguments, is_taken in ((ROME[1], True), ({"city": "Rome"}, False)):
            text = syntax.form.written([("get_weather", arguments)])
            said = f"So: {text}" if syntax.form.mark in text else f"So: {syntax.form.mark}{text}"
            assert follows(tool_vocabulary, grammar, said) is is_taken
    else:
        for wrong in ({"city": "Rome"}, {**ROME[1], "days": "2"}):
            text = syntax.form.written([("get_weather", wrong)])
            assert not follows(tool_vocabulary, grammar, text)
        for text in ("get_weather is a tool.", "note", "", "\n[a] list"):
            assert follows(tool_vocabulary, grammar, text)


@pytest.mark.parametrize("syntax", TABLE, ids=IDS)
def test_calls_of_each_family_or_an_answer_by_its_schema(tool_vocabulary, syntax: ToolSyntax):
    """Tools beside a schema of the answer: one or the other, and each is read as what it is."""
    answer = {
        "type": "object",
        "properties": {"rain": {"$ref": "#/$defs/day"}},
        "required": ["rain"],
        "additionalProperties": False,
        "$defs": {"day": {"enum": ["today", "soon"]}},
    }
    forced = ForcedCalls(syntax.form, SCHEMAS, {}, several=True, answer=answer)
    grammar = Grammar.lark(forced.grammar())
    for calls in ([ROME], [NOTE]):
        assert follows(tool_vocabulary, grammar, syntax.form.written(calls))
    text = f'{syntax.form.answer}{{"rain": "today"}}'
    assert follows(tool_vocabulary, grammar, text)
    think = next((tags for _, tags in THINKING if syntax.form.answer in tags.around), None)
    reply = read_reply(syntax, [text], SCHEMAS, think=think)
    assert (reply.calls, json.loads(reply.content)) == ([], {"rain": "today"})
    wrong = syntax.form.written([("get_weather", {"city": "Rome"})])
    for other in ("It rains.", text.replace("today", "never"), f"So: {text}", wrong):
        assert not follows(tool_vocabulary, grammar, other), other
