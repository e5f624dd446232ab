"""Conversations that a template refuses, or leaves out in part, are put so that it takes them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.replies import chat_text

from specrun.bindings.errors import TemplateError
from specrun.runtime.chat import ChatTemplate

_ROLES_ALTERNATE = (
    "{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}"
)
_BODY = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + _BODY
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + _ROLES_ALTERNATE + _BODY
)
SYSTEM_ALTERNATE = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}\n"
    "{% set messages = messages[1:] %}{% endif %}" + _ROLES_ALTERNATE + _BODY
)
FIRST_SHOWN = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
LAST_SHOWN = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endfor %}<system>{{ ns.s }}\n"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
)
USER_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% else %}"
    "{{ m.content | trim }}{% endif %}{{ '\n' }}{% endfor %}"
)
SWITCHED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | replace('/no_think', '') | trim }}\n"
    "{% endfor %}{{ 'quick' if '/no_think' in messages[0].content }}"
)
TALK = [
    ("system", "Be brief."),
    ("user", "Hi."),
    ("assistant", "Hello."),
    ("user", "And?"),
]


def said(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def lines(*messages: tuple[str, str]) -> str:
    return "".join(f"<{role}>{content}\n" for role, content in messages)


@pytest.mark.parametrize(
    "source", [PLAIN, FIRST_ONLY, SYSTEM_ALTERNATE, FIRST_SHOWN, LAST_SHOWN, PARTS, USER_PARTS]
)
def test_what_a_template_takes_is_not_changed(vocabulary, source, caplog):
    assert chat_text(ChatTemplate(source), vocabulary, said(*TALK)).text == lines(*TALK)
    assert not caplog.records


TWO = [("system", "Be brief."), ("developer", "Be kind."), ("user", "Hi.")]
LATE = [*TALK[:3], ("system", "It is late."), ("user", "And?")]
ENDS = [*TALK, ("developer", "It is late.")]
ONE_FIRST = [("system", "Be brief.\n\nBe kind."), ("user", "Hi.")]
LATE_USER = [*TALK[:3], ("user", "It is late."), ("user", "And?")]
LATE_JOINED = [*TALK[:3], ("user", "It is late.\n\nAnd?")]
CASES: dict[str, tuple[str, list[tuple[str, str]], list[tuple[str, str]]]] = {
    "several stay where they are taken": (
        PLAIN,
        [*TWO, ("system", "It is late.")],
        [TWO[0], ("system", "Be kind."), TWO[2], ("system", "It is late.")],
    ),
    "the first ones are joined": (FIRST_ONLY, TWO, ONE_FIRST),
    "the first ones are joined if one is lost": (FIRST_SHOWN, TWO, ONE_FIRST),
    "or the other": (LAST_SHOWN, TWO, ONE_FIRST),
    "later ones are the user's": (FIRST_ONLY, LATE, LATE_USER),
    "later ones are not lost": (FIRST_SHOWN, LATE, LATE_USER),
    "later ones do not replace the first": (LAST_SHOWN, LATE, LATE_USER),
    "they may come last": (FIRST_ONLY, ENDS, [*TALK, ("user", "It is late.")]),
    "neighbours are joined": (SYSTEM_ALTERNATE, LATE, LATE_JOINED),
    "neighbours without a system": (
        SYSTEM_ALTERNATE,
        [("user", "Hi."), ("user", "So?"), ("assistant", "Yes."), ("assistant", "No."), TALK[3]],
        [("user", "Hi.\n\nSo?"), ("assistant", "Yes.\n\nNo."), TALK[3]],
    ),
    "no system at all": (
        NO_SYSTEM,
        LATE,
        [("user", "Be brief.\n\nHi."), TALK[2], ("user", "It is late.\n\nAnd?")],
    ),
    "the system's text alone": (NO_SYSTEM, TALK[:1], [("user", "Be brief.")]),
    "nobody asks": (FIRST_ONLY, TALK[:1], [("user", "Be brief.")]),
    "the answer is first": (NO_SYSTEM, TALK[2:], [("user", ""), *TALK[2:]]),
    "the system's text is before it": (
        SYSTEM_ALTERNATE,
        [TALK[0], *TALK[2:]],
        [("user", "Be brief."), *TALK[2:]],
    ),
    "parts are given to whoever prints them": (PARTS, LATE, LATE),
    "a template's own sign is no loss": (
        SWITCHED,
        [("system", "/no_think"), ("user", "Hi.")],
        [("system", ""), ("user", "Hi.")],
    ),
}


@pytest.mark.parametrize(("source", "talk", "expected"), CASES.values(), ids=CASES)
def test_what_a_template_refuses_or_loses_is_put_in_another_form(
    vocabulary, source, talk, expected
):
    text = chat_text(ChatTemplate(source), vocabulary, said(*talk)).text
    assert text.removesuffix("quick") == lines(*expected)


def test_the_log_says_it_once(vocabulary, caplog):
    template = ChatTemplate(NO_SYSTEM)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chat_text(template, vocabulary, said(*TALK))
    (record,) = caplog.records
    assert "the system's text is before the user's" in record.message


def test_a_refusal_of_all_forms_is_the_templates_own(vocabulary):
    template = ChatTemplate("{{ raise_exception('not today') }}")
    with pytest.raises(TemplateError, match="refuses this conversation: not today"):
        chat_text(template, vocabulary, said(*TALK))


@pytest.mark.parametrize("text", ["Is it raining?", "a", "Safe"])
def test_a_question_that_is_left_out_is_an_error(vocabulary, text):
    template = ChatTemplate("<s>Is this safe? Say Safe or not.</s>")
    with pytest.raises(TemplateError, match="leaves out the user's last message"):
        chat_text(template, vocabulary, said(("user", text)))


def test_texts_that_the_template_has_itself_are_looked_at_twice(vocabulary):
    source = "<system>You are kind.\n" + FIRST_SHOWN
    talk = [*TALK[:3], ("system", "You are kind."), ("user", "And?")]
    text = chat_text(ChatTemplate(source), vocabulary, said(*talk)).text
    assert text == "<system>You are kind.\n" + lines(
        *TALK[:3], ("user", "You are kind."), ("user", "And?")
    )


# -- calls -----------------------------------------------------------------------------------------

_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "dry"},
]
_CALLS = (
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ '\n' }}"
)
GENERIC_CALL = '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]}'
WITH_CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + _CALLS + "{% endfor %}"
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}" + _CALLS + "{% else %}"
    "{{ m.content }}\n{% endif %}{% endfor %}"
)
NULL_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name + c.function.arguments }}{% endfor %}{{ '\n' }}{% else %}"
    "{{ m.content }}\n{% endif %}{% endfor %}"
)
TOLD = {
    "beside each other": (
        WITH_CALLS,
        '<assistant>I look.<call>get_weather{"city": "Paris"}\n<tool>dry\n',
    ),
    "a text that is left out comes before": (
        EITHER,
        '<assistant>I look.\n<assistant><call>get_weather{"city": "Paris"}\n<tool>dry\n',
    ),
    "where content is null, with arguments as a text": (
        NULL_ONLY,
        '<assistant>I look.\n<assistant><call>get_weather{"city": "Paris"}\n<tool>dry\n',
    ),
    "by a template that knows none": (
        PLAIN,
        f"<assistant>I look.\n{GENERIC_CALL}\n<tool>dry\n",
    ),
    "by one that refuses them": (
        NO_SYSTEM.replace("if m.role != 'tool' and not m.tool_calls ", ""),
        f"<assistant>I look.\n{GENERIC_CALL}\n<user>[get_weather returned]\ndry\n",
    ),
}


@pytest.mark.parametrize(("source", "expected"), TOLD.values(), ids=TOLD)
@pytest.mark.parametrize("tools", [[], [_CALL]])
def test_calls_are_told(vocabulary, source, expected, tools):
    source += "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    text = chat_text(ChatTemplate(source), vocabulary, CALLED, tools=tools).text
    assert text.removesuffix("get_weather") == "<user>Rain?\n" + expected


ALTERNATING = (
    "{% if messages | selectattr('role', 'equalto', 'system') | list %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + _ROLES_ALTERNATE + EITHER
)
"""As Mistral's: calls and results count as no turns, and a text beside a call is not printed."""
_ALONE = [{**CALLED[1], "content": ""}, CALLED[2]]
_CALL_LINE, _RESULT_LINE = '<assistant><call>get_weather{"city": "Paris"}\n', "<tool>dry"
BEHIND = {
    "a question behind a result": (
        [CALLED[0], *_ALONE, *said(("system", "It is late."), ("user", "And now?"))],
        f"{_CALL_LINE}{_RESULT_LINE}\n\nIt is late.\n\nAnd now?\n",
    ),
    "a text beside a call, and an answer": (
        [*CALLED, *said(("assistant", "It is dry."), ("user", "And now?"))],
        f"{_CALL_LINE}{_RESULT_LINE}\n<assistant>I look.\n\nIt is dry.\n<user>And now?\n",
    ),
    "a text beside a call, and a question": (
        [*CALLED, *said(("user", "And now?"))],
        f"<assistant>I look.\n{_CALL_LINE}{_RESULT_LINE}\n<user>And now?\n",
    ),
    "a text beside a call that was answered just now": (
        CALLED,
        f"<assistant>I look.\n{_CALL_LINE}{_RESULT_LINE}\n",
    ),
    "texts beside calls in a row that no answer follows yet": (
        [*CALLED, {**CALLED[1], "content": "I look again."}, CALLED[2]],
        f"{_CALL_LINE}<tool>[said with the call]\nI look.\n\ndry\n"
        f"{_CALL_LINE}<tool>[said with the call]\nI look again.\n\ndry\n",
    ),
}


@pytest.mark.parametrize(("talk", "expected"), BEHIND.values(), ids=BEHIND)
def test_calls_keep_their_form_where_turns_alternate(vocabulary, talk, expected):
    text = chat_text(ChatTemplate(ALTERNATING), vocabulary, talk).text
    assert text == "<user>Rain?\n" + expected


def test_a_second_call_is_not_lost_because_a_first_one_was_written(vocabulary):
    template = ChatTemplate(WITH_CALLS.replace("m.tool_calls", "(m.tool_calls or [])[:1]"))
    chat_text(template, vocabulary, CALLED)
    other = {**_CALL, "id": "abcdefghj", "function": {"name": "get_time", "arguments": {}}}
    talk = [CALLED[0], {**CALLED[1], "tool_calls": [_CALL, other]}, CALLED[2]]
    talk.append({**CALLED[2], "tool_call_id": "abcdefghj", "content": "noon"})
    text = chat_text(template, vocabulary, talk).text
    assert text == (
        '<user>Rain?\n<assistant>I look.<call>get_weather{"city": "Paris"}\n<tool>dry\n'
        "<assistant><call>get_time{}\n<tool>noon\n"
    )


def test_a_template_may_collect_in_lists_of_its_own(vocabulary):
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}"
        "{% set _ = ns.seen.append(m.role) %}{{ m.content }}{% endfor %}{{ ns.seen | join(',') }}"
        "{{ ns.seen.pop(0) }}"
    )
    text = chat_text(ChatTemplate(source), vocabulary, said(*TALK[1:3])).text
    assert text == "Hi.Hello.user,assistantuser"


def test_arguments_without_a_description_have_an_empty_one_where_it_is_added(vocabulary):
    source = (
        "{% for tool in tools %}{% for name, own in tool.function.parameters.properties.items() %}"
        "{{ name + ': ' + own.description }}.{% endfor %}{% endfor %}" + PLAIN
    )
    properties = {"city": {"type": "string"}, "day": {"type": "string", "description": "when"}}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    tool = {"type": "function", "function": function}
    text = chat_text(ChatTemplate(source), vocabulary, said(TALK[1]), tools=[tool]).text
    assert text == "city: .day: when." + lines(TALK[1])
    refusing = ChatTemplate("{{ raise_exception('never') }}")
    with pytest.raises(TemplateError, match="never"):
        chat_text(refusing, vocabulary, said(TALK[1]), tools=[tool])
