"""Replies of chat models: golden texts of each family, however they are split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.runtime.chat import (
    Content,
    MoreArguments,
    Part,
    Reasoning,
    Reply,
    ReplyParser,
    ThinkTags,
    ToolCall,
    ToolSyntax,
)
from specrun.runtime.chat.families import HERMES, LLAMA3, MISTRAL, QWEN_CODER

TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
}
PARIS = ToolCall("get_weather", '{"city": "Paris"}')
ROME = ToolCall("get_weather", '{"city": "Rome \\"\\u00e9{\\""}')
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
OTHER = '{"name": "get_weather", "arguments": {"city": "Rome \\"\\u00e9{\\""}}'

# syntax, text, content, calls
GOLDEN: dict[str, tuple[ToolSyntax, str, str, list[ToolCall]]] = {
    "qwen, two": (
        HERMES,
        f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n",
        "Let me look.",
        [PARIS, ROME],
    ),
    "closing tag left out": (HERMES, f"<tool_call>{CALL}<tool_call>{CALL}", "", [PARIS, PARIS]),
    "arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        "",
        [PARIS],
    ),
    "arguments as a string": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        "",
        [PARIS],
    ),
    "no arguments": (
        HERMES,
        '<tool_call>{"name": "add"}</tool_call>',
        "",
        [ToolCall("add", "{}")],
    ),
    "content after a call": (
        HERMES,
        f"<tool_call>{CALL}</tool_call>\nDone. ",
        "\nDone.",
        [PARIS],
    ),
    "ended within a text": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        "",
        [ToolCall("get_weather", '{"city": "Par"}')],
    ),
    "a tag before the tag": (
        HERMES,
        f"<tool_call><tool_call>{CALL}</tool_call>",
        "<tool_call>",
        [PARIS],
    ),
    "an open string before the call": (
        HERMES,
        f'<tool_call>{{"name: x}}\n<tool_call>{CALL}</tool_call>',
        '<tool_call>{"name: x}',
        [PARIS],
    ),
    "a bracket missing": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>',
        "",
        [ToolCall("add", '{"a": 1}')],
    ),
    "Python's quotes": (
        HERMES,
        "<tool_call>{'name': 'add', 'arguments': {'a': 1, 'note': \"it's\", 'b': [True, None,]}}",
        "",
        [ToolCall("add", '{"a": 1, "note": "it\'s", "b": [true, null]}')],
    ),
    "llama 3 with a type": (
        LLAMA3,
        '\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}\n',
        "",
        [PARIS],
    ),
    "llama 3, content first": (
        LLAMA3,
        'I look. <|python_tag|>{"name": "add", "parameters": {}}',
        "I look.",
        [ToolCall("add", "{}")],
    ),
    "mistral since v11": (
        MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{}',
        "",
        [PARIS, ToolCall("add", "{}")],
    ),
    "mistral with call ids": (
        MISTRAL,
        'So:[TOOL_CALLS]add[CALL_ID]Ab3dE6gH9[ARGS]{"a": -1.5e3}',
        "So:",
        [ToolCall("add", '{"a": -1.5e3}')],
    ),
    "mistral without a mark": (
        MISTRAL,
        '[TOOL_CALLS]get_weather{"city": "Paris"}',
        "",
        [PARIS],
    ),
    "qwen3-coder without the outer tag": (
        QWEN_CODER,
        "<function=add>\n</function>\n</tool_call>",
        "",
        [ToolCall("add", "{}")],
    ),
}

# Texts that only look like calls.
CONTENT: dict[str, tuple[ToolSyntax, str]] = {
    "nothing": (HERMES, ""),
    "spaces": (HERMES, " \n"),
    "text": (HERMES, "Use <tool> or <tool_callback> tags.\n"),
    "no JSON": (HERMES, "<tool_call> is a tag, </tool_call> closes it"),
    "unknown tool": (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    "name is no text": (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    "no name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "arguments are a list": (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    "arguments are text": (HERMES, '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'),
    "ends in its head": (HERMES, '<tool_call>{"name": "add", "argum'),
    "ends in an escape": (HERMES, '<tool_call>{"name": "ad\\'),
    "a bad escape": (HERMES, '<tool_call>{"na\\xme": 1}'),
    "no number": (HERMES, '<tool_call>{"id": 1x, "name": "add"}'),
    "deep": (HERMES, '<tool_call>{"id": ' + "[" * 5000 + "]" * 5000 + ', "name": "add"}'),
    "JSON of its own": (LLAMA3, '{"name": "Bob", "parameters": {"age": 3}}'),
    "JSON not at the beginning": (LLAMA3, 'So: {"name": "add", "parameters": {}}'),
    "code": (LLAMA3, "<|python_tag|>print(1)"),
    "a list": (MISTRAL, "[TOOL_CALLS] [1, 2]"),
    "an unknown name": (MISTRAL, "[TOOL_CALLS]rm[ARGS]{}"),
    "part of a mark": (MISTRAL, "[TOOL_CALL"),
    "a tag": (QWEN_CODER, "<tool_call><functional=add>"),
    "an unknown function": (QWEN_CODER, "<function=rm></function>"),
    "an open tag": (QWEN_CODER, "<function=add"),
}


def parsed(
    syntax: ToolSyntax | None, pieces: list[str], **options: object
) -> tuple[Reply, list[Part]]:
    parser, reply, parts = ReplyParser(syntax, TOOLS, **options), Reply(), []  # type: ignore[arg-type]
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    reply.add(parts)
    return reply, parts


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), GOLDEN.values(), ids=GOLDEN)
def test_calls_of_each_family(syntax, text, content, calls):
    for pieces in ([text], list(text)):
        reply, _ = parsed(syntax, pieces)
        assert (reply.content, reply.calls, reply.reasoning) == (content, calls, "")


@pytest.mark.parametrize(("syntax", "text"), CONTENT.values(), ids=CONTENT)
def test_what_only_looks_like_a_call_is_content(syntax, text):
    for pieces in ([text], list(text)):
        reply, _ = parsed(syntax, pieces)
        assert (reply.content, reply.calls) == (text, [])


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<function=add>"),
    *("</function>", "<parameter=a>", "</parameter>", CALL, *'[]{}",:', "\\"),
    *('"name"', '"add"', '"arguments"', " ", "\n", "a", "1", ";", "<", "<think>", "</think>"),
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
def test_nothing_is_lost_or_said_twice_where_there_is_no_call(text):
    for syntax in (HERMES, LLAMA3, MISTRAL, QWEN_CODER):
        reply, _ = parsed(syntax, [text])
        assert parsed(syntax, list(text))[0] == reply
        if not reply.calls:
            assert reply.content == text


def test_arguments_grow_with_the_text():
    parser = ReplyParser(HERMES, TOOLS)
    text = '<tool_call>{"name": "add", "arguments": {"a": 12, "note": "hello"}}</tool_call>'
    given = [parser.push(character) for character in text]
    grown = [part.text for parts in given for part in parts if isinstance(part, MoreArguments)]
    assert "".join(grown) == '{"a": 12, "note": "hello"}'
    assert max(map(len, grown)) == 3  # a comma and a space come with what follows them


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), GOLDEN.values(), ids=GOLDEN)
def test_no_part_of_a_marker_is_ever_content(syntax, text, content, calls):
    """At no moment is more content out than the whole text has: none of it is taken back."""
    parser, said = ReplyParser(syntax, TOOLS), ""
    for character in text:
        said += "".join(p.text for p in parser.push(character) if isinstance(p, Content))
        assert content.startswith(said)


def test_only_as_many_calls_as_were_asked_for():
    parser, reply = ReplyParser(HERMES, TOOLS, most_calls=1), Reply()
    reply.add(parser.push(f"<tool_call>{CALL[:-1]}"))
    assert not parser.done
    reply.add(parser.push("}"))
    assert parser.done
    reply.add(parser.push(f"</tool_call><tool_call>{CALL}</tool_call> and so on"))
    reply.add(parser.finish())
    assert (reply.content, reply.calls) == ("", [PARIS])


THINK = {
    "tags": ("<think>\nHm, {a}.\n</think>\n\nYes.", False, "Hm, {a}.", "Yes."),
    "the prompt opened them": ("Hm.\n</think>\nYes.", True, "Hm.", "Yes."),
    "never closed": ("<think>Hm", False, "Hm", ""),
    "nothing thought": ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    "no tags": ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
    "only spaces": (" \n", False, "", " \n"),
    "a call that was thought of": (
        f"<think><tool_call>{CALL}</tool_call></think>No.",
        False,
        f"<tool_call>{CALL}</tool_call>",
        "No.",
    ),
}


@pytest.mark.parametrize(("text", "thinking", "reasoning", "content"), THINK.values(), ids=THINK)
def test_reasoning(text, thinking, reasoning, content):
    for syntax in (None, HERMES):
        for pieces in ([text], list(text)):
            think = ThinkTags("<think>", "</think>")
            reply, parts = parsed(syntax, pieces, think=think, thinking=thinking)
            assert (reply.reasoning, reply.content, reply.calls) == (reasoning, content, [])
            kinds = [type(part) for part in parts]
            assert kinds == sorted(kinds, key=[Reasoning, Content].index)


def test_a_call_after_reasoning():
    text = f"<think>I need it.</think>\n\n<tool_call>\n{CALL}\n</tool_call>"
    reply, _ = parsed(HERMES, list(text), think=ThinkTags("<think>", "</think>"))
    assert (reply.reasoning, reply.content, reply.calls) == ("I need it.", "", [PARIS])


def test_arguments_are_cut_where_the_text_is():
    parser, reply = ReplyParser(HERMES, TOOLS), Reply()
    reply.add(parser.push('<tool_call>{"name": "add", "arguments": {"note": "he'))
    reply.add(parser.finish(is_cut=True))
    assert reply.calls == [ToolCall("add", '{"note": "he')]
