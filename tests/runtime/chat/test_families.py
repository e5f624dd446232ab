"""Replies of every family of the table, as its models write them: whole, streamed, and cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.replies import read_reply

from specrun.runtime.chat import MoreArguments, ReplyParser, ThinkTags, ToolSyntax
from specrun.runtime.chat import families as table
from specrun.runtime.chat.families import FAMILIES, GENERIC, THINKING

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "number"},
            "b": {"type": "object"},
            "note": {"type": "string"},
        },
    },
}
PARIS = ("get_weather", {"city": "Paris", "days": 2})
ADD = ("add", {"a": 1.5, "b": {"k": ["x", True, None]}, "note": 'say "<b>"\n\t{1}'})
CALLS = [PARIS, ADD]

TABLE = [*FAMILIES, GENERIC]
IDS = [f"{k} {syntax.name}" for k, syntax in enumerate(TABLE)]


def calls_of(reply):
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


@pytest.mark.parametrize("syntax", TABLE, ids=IDS)
def test_what_a_family_writes_is_read(syntax: ToolSyntax):
    """The form of the table, which calls are forced in, is the form that is read."""
    calls = CALLS if syntax.form.separator is not None else CALLS[:1]
    text = syntax.form.written(calls)
    for pieces in ([text], list(text)):
        reply = read_reply(syntax, pieces, TOOLS)
        assert (reply.content, calls_of(reply)) == ("", calls)
    if not syntax.at_start and syntax.read is None:
        reply = read_reply(syntax, [f"I look.\n\n{text}\n"], TOOLS)
        assert (reply.content, calls_of(reply)) == ("I look.", calls)


@pytest.mark.parametrize("syntax", TABLE, ids=IDS)
def test_a_reply_may_end_anywhere(syntax: ToolSyntax):
    """Arguments are JSON if the model ended; a cut text is the begin of the whole one."""
    text = syntax.form.written(CALLS if syntax.form.separator is not None else CALLS[:1])
    whole = read_reply(syntax, [text], TOOLS).calls
    for place in range(len(text)):
        ended = read_reply(syntax, [text[:place]], TOOLS).calls
        assert all(isinstance(json.loads(call.arguments), dict) for call in ended)
        cut = read_reply(syntax, [text[:place]], TOOLS, is_cut=True).calls
        for call, entire in zip(cut, whole, strict=False):
            assert entire.arguments.startswith(call.arguments.removesuffix("}"))


# family, text, content, calls. `{}` quirks that models of the family are known for.
GOLDEN: dict[str, tuple[ToolSyntax, str, str, list[tuple[str, object]]]] = {
    "hermes: raw line breaks and tabs": (
        table.HERMES,
        '<tool_call>{"name": "add", "arguments": {"note": "a\n\tb\r\n"}}</tool_call>',
        "",
        [("add", {"note": "a\n\tb\r\n"})],
    ),
    "hermes: quotes that are not escaped": (
        table.HERMES,
        '<tool_call>{"name": "add", "arguments": {"note": "say "hi" now", "a": 1}}</tool_call>',
        "",
        [("add", {"note": 'say "hi" now', "a": 1})],
    ),
    "hermes: a mark within a text": (
        table.HERMES,
        '<tool_call>{"name": "add", "arguments": {"note": "</tool_call>"}}</tool_call>',
        "",
        [("add", {"note": "</tool_call>"})],
    ),
    "hermes: OpenAI's object": (
        table.HERMES,
        '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
        "</tool_call>",
        "",
        [("add", {"a": 1})],
    ),
    "hermes: escapes that JSON does not have": (
        table.HERMES,
        r'<tool_call>{"name": "add", "arguments": {"note": "\d \x41 \' \ud83d"}}</tool_call>',
        "",
        [("add", {"note": "\\d A ' \ufffd"})],
    ),
    "llama 3: a tag before each": (
        table.LLAMA3,
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
        "",
        [("add", {"a": 1}), ("add", {})],
    ),
    "llama 4: Python": (
        table.LLAMA4,
        "[get_weather(city='Paris', days=3), add(a=-1, b={'k': (True, None)})]",
        "",
        [
            ("get_weather", {"city": "Paris", "days": 3}),
            ("add", {"a": -1, "b": {"k": [True, None]}}),
        ],
    ),
    "llama 4: an object": (
        table.LLAMA4_JSON,
        '<|python_start|>{"name": "add", "parameters": {"a": 1}}<|python_end|>',
        "",
        [("add", {"a": 1})],
    ),
    "llama 4: an object among Python's": (
        table.LLAMA4,
        '[{"name": "add", "parameters": {"a": 1}}]',
        "",
        [("add", {"a": 1})],
    ),
    "llama 3: Python": (table.LLAMA3, "[add(a=1)]", "", [("add", {"a": 1})]),
    "llama 3: no function of Python's": (table.LLAMA3, "[add] is one", "[add] is one", []),
    "llama 4: a list that is none of calls": (
        table.LLAMA4,
        "[1, 2] is a list",
        "[1, 2] is a list",
        [],
    ),
    "lfm2: without names": (
        table.LFM2,
        'So: <|tool_call_start|>[get_weather("Paris", 2)]<|tool_call_end|>Wait.',
        "So:Wait.",
        [("get_weather", {"city": "Paris", "days": 2})],
    ),
    "mistral: ids behind": (
        table.MISTRAL,
        '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "add", "id": "Ab3dE6gH9"}]',
        "",
        [("add", {"a": 1})],
    ),
    "mistral: call ids": (
        table.MISTRAL_IDS,
        'Hm.[TOOL_CALLS]add[CALL_ID]Ab3dE6gH9[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{}',
        "Hm.",
        [("add", {"a": 1}), ("add", {})],
    ),
    "deepseek v3": (
        table.DEEPSEEK_V3,
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json'
        "\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [("add", {"a": 1}), ("add", {})],
    ),
    "deepseek v3.1 with the older frame": (
        table.DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("add", {})],
    ),
    "kimi k2: no section": (
        table.KIMI_K2,
        '<|tool_call_begin|>functions.add:12<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
        "",
        [("add", {"a": 1})],
    ),
    "gemma 4: nested": (
        table.GEMMA4,
        '<|tool_call>call:add{a:1,b:{k:[<|"|>x, "y"<|"|>,true],l:{}},'
        'note:<|"|>\\n<b>\n<|"|>}<tool_call|>',
        "",
        [("add", {"a": 1, "b": {"k": ['x, "y"', True], "l": {}}, "note": "\\n<b>\n"})],
    ),
    "functionary v3.2": (
        table.FUNCTIONARY_V32,
        'all\nI look.>>>add\n{"a": 1}>>>get_weather\n{"city": "Rome"}',
        "I look.",
        [("add", {"a": 1}), ("get_weather", {"city": "Rome"})],
    ),
    "functionary v3.2: a call at once": (
        table.FUNCTIONARY_V32,
        'add\n{"a": 1}',
        "",
        [("add", {"a": 1})],
    ),
    "coder: closing tags missing": (
        table.QWEN_CODER,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n<parameter=note>\nx\n</function>\n</tool_call>",
        "",
        [("add", {"a": 1, "note": "x"})],
    ),
    "coder: tags within a value": (
        table.QWEN_CODER,
        "<tool_call>\n<function=add>\n<parameter=note>\n<b>1</b> </parameter> and <parameter=x>\n"
        "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
        "",
        [
            (
                "add",
                {
                    "note": "<b>1</b> </parameter> and <parameter=x>\n<tool_call>\n<function=add>\n"
                    "<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>",
                    "a": 2,
                },
            )
        ],
    ),
    "coder: values by their schema": (
        table.QWEN_CODER,
        "<tool_call>\n<function=add>\n<parameter=note>\n12\n</parameter>\n<parameter=b>\n"
        "{'k': (True, None)}\n</parameter>\n<parameter=other>\n7\n</parameter>\n</function>",
        "",
        [("add", {"note": "12", "b": {"k": [True, None]}, "other": 7})],
    ),
    "coder: an object instead of tags": (
        table.QWEN_CODER,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "",
        [("add", {"a": 1})],
    ),
    "coder: no arguments": (
        table.QWEN_CODER,
        "<tool_call>\n<function=add>\n</function>\n</tool_call>\nDone.",
        "\nDone.",
        [("add", {})],
    ),
    "glm: on one line": (
        table.GLM,
        "Hm.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        "Hm.",
        [PARIS],
    ),
    "glm: no arguments": (table.GLM, "<tool_call>add\n</tool_call>", "", [("add", {})]),
    "dsml: what its tag says, without a schema": (
        table.DSML,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="x" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="y" string="false">12</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [("add", {"x": "12", "y": 12})],
    ),
    "minimax m3: elements": (
        table.MINIMAX_M3,
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">]<]minimax[>[<b>]<]minimax[>[<k>'
        "]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[<item>true]<]minimax[>[</item>"
        "]<]minimax[>[</k>]<]minimax[>[</b>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "",
        [("add", {"b": {"k": ["x", True]}})],
    ),
    "minicpm 5: characters that would close": (
        table.MINICPM5,
        '<function name="add"><param name="note"><![CDATA[a</param>]]></param></function>',
        "",
        [("add", {"note": "a</param>"})],
    ),
    "apertus: names are keys": (
        table.APERTUS,
        '<|tools_prefix|>[{"add": {"a": 1}}, {"get_weather": {"city": "Rome"}}]<|tools_suffix|>',
        "",
        [("add", {"a": 1}), ("get_weather", {"city": "Rome"})],
    ),
    "command r+": (
        table.COMMAND_R_PLUS,
        'Action: ```json\n[\n    {\n        "tool_name": "add",\n        "parameters": {\n'
        '            "a": 1\n        }\n    }\n]```',
        "",
        [("add", {"a": 1})],
    ),
    "mcp": (
        table.MCP,
        "<use_mcp_tool>\n<server_name>tools</server_name>\n<tool_name>add</tool_name>\n<arguments>\n"
        '{"a": 1}\n</arguments>\n</use_mcp_tool>',
        "",
        [("add", {"a": 1})],
    ),
    "generic": (
        table.GENERIC,
        '{"tool_call": {"name": "add", "arguments": {"a": 1}}}',
        "",
        [("add", {"a": 1})],
    ),
    "generic: several, in a fence": (
        table.GENERIC,
        '```json\n{"tool_calls": [{"name": "add", "arguments": {}}, '
        '{"name": "add", "arguments": {}}]}\n```',
        "",
        [("add", {}), ("add", {})],
    ),
    "generic: behind a text": (
        table.GENERIC,
        'I look.\n{"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}\n',
        "I look.",
        [("add", {"a": 1})],
    ),
    "generic: an answer": (
        table.GENERIC,
        '{"response": "a\\n\\"b\\" \\ud83d\\ude00"}',
        'a\n"b" 😀',
        [],
    ),
    "generic: a text": (table.GENERIC, "It rains.", "It rains.", []),
    "gpt-oss: a tool in the channel": (
        table.GPT_OSS,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        "I look.",
        [("add", {"a": 1})],
    ),
    "gpt-oss: a tool in the role": (
        table.GPT_OSS,
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "",
        [("add", {"a": 1})],
    ),
    "gpt-oss: an answer": (
        table.GPT_OSS,
        "<|channel|>final<|message|>It rains.<|return|>",
        "It rains.",
        [],
    ),
    "gpt-oss: no message at all": (table.GPT_OSS, "It rains.", "It rains.", []),
    "muse": (
        table.MUSE,
        ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n'
        '<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
        "<|eom|><|start|>assistant to=user"
        "<|message|>Done.<|eot|>",
        "Done.",
        [("add", {"a": 1})],
    ),
}


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), GOLDEN.values(), ids=GOLDEN)
def test_replies_as_models_write_them(syntax, text, content, calls):
    for pieces in ([text], list(text)):
        reply = read_reply(syntax, pieces, TOOLS)
        assert (reply.content, calls_of(reply), reply.reasoning) == (content, calls, "")


THOUGHTS = {f"{k} {tags.first.strip()}": tags for k, (_, tags) in enumerate(THINKING)}


@pytest.mark.parametrize("think", THOUGHTS.values(), ids=THOUGHTS)
def test_reasoning_of_each_family(think: ThinkTags):
    syntax = {"<|end|>": table.GPT_OSS, "<|eom|>": table.MUSE}.get(think.last)
    if think.follow != "<|start|>assistant":
        syntax = None
    opened, closed = (*think.around[:2], "", "")[:2]
    if think.around[1:] and not think.around[1].startswith(("</", "<|END", "<|close")):
        opened, closed = think.follow + think.around[1], ""
    if syntax is not None:
        header = "<|channel|>final" if syntax is table.GPT_OSS else " to=user"
        opened, closed = f"{think.follow}{header}<|message|>", think.last
    answer = f"{opened}Yes.{closed}"
    for begun in (False, True) if syntax is None else (False,):
        text = ("" if begun else think.first) + f"\nHm, so.\n{think.last}\n\n{answer}"
        for pieces in ([text], list(text)):
            reply = read_reply(syntax, pieces, TOOLS, think=think, thinking=begun)
            assert (reply.reasoning.strip(), reply.content) == ("Hm, so.", "Yes.")


WHOLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OPEN = {
    "a call": (f"I need it.\n{WHOLE}", "I need it.", "", [("add", {"a": 1})]),
    "two calls": (f"Both.\n{WHOLE}\n{WHOLE}\n", "Both.", "", [("add", {"a": 1})] * 2),
    "a call that was thought of": (f"So {WHOLE}?</think>No.", f"So {WHOLE}?", "No.", []),
    "prose": ("A <tool_call> holds JSON", "A <tool_call> holds JSON", "", []),
    "another's tool": (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        "",
        [],
    ),
    "half a call": (WHOLE[:40], WHOLE[:40], "", []),
    "prose, then closed": ("A <tool_call> of add</think>Yes.", "A <tool_call> of add", "Yes.", []),
}


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), OPEN.values(), ids=OPEN)
def test_calls_in_reasoning_that_never_ends(text, reasoning, content, calls):
    for pieces in ([text], list(text)):
        reply = read_reply(
            table.HERMES, pieces, TOOLS, think=ThinkTags("<think>", "</think>"), thinking=True
        )
        assert (reply.reasoning, reply.content, calls_of(reply)) == (reasoning, content, calls)


@pytest.mark.parametrize(
    "syntax", [each for each in FAMILIES if each.openers], ids=lambda s: s.name
)
def test_calls_of_each_family_in_reasoning_that_never_ends(syntax: ToolSyntax):
    if syntax.at_start or syntax.read is not None:
        return
    text = "Hm.\n" + syntax.form.written([PARIS])
    think = ThinkTags("<think>", "</think>")
    reply = read_reply(syntax, [text], TOOLS, think=think, thinking=True)
    assert (reply.reasoning, reply.content, calls_of(reply)) == ("Hm.", "", [PARIS])
    reply = read_reply(syntax, [f"{text}</think>No."], TOOLS, think=think, thinking=True)
    assert (reply.reasoning, reply.content, reply.calls) == (text, "No.", [])


BITS = ["", '"', "'", "{", "}", "[", "]", ",", ":", "\\", "\n", " ", "<", "1", "\\u12", "=", "```"]
BITS += ["\\ud83d", "</parameter>", "<parameter=a>", "<think>", "</think>"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_whatever_a_model_breaks_the_arguments_are_json(data):
    """Texts with pieces left out and put in: no split changes them, and all arguments are JSON."""
    syntax = data.draw(st.sampled_from(TABLE))
    text = syntax.form.written(CALLS if syntax.form.separator is not None else CALLS[:1])
    bits = st.sampled_from([*BITS, *syntax.marks, text])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        end = place + data.draw(st.sampled_from([0, 1, 2, 5, 20]))
        text = text[:place] + data.draw(bits) + text[end:]
    options = {}
    if data.draw(st.booleans()):
        think, thinking = ThinkTags("<think>", "</think>"), data.draw(st.booleans())
        options = {"think": think, "thinking": thinking}
    whole = read_reply(syntax, [text], TOOLS, **options)
    assert read_reply(syntax, list(text), TOOLS, **options) == whole
    place = data.draw(st.integers(0, len(text)))
    assert read_reply(syntax, [text[:place], text[place:]], TOOLS, **options) == whole
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)


def test_a_deep_value_ends_no_server():
    text = '<tool_call>{"name": "add", "arguments": {"b": ' + "[" * 20_000
    parser = ReplyParser(table.HERMES, TOOLS)
    parser.push(text)
    assert parser.finish()


def test_the_page_of_families_has_each():
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert sorted(rows[1:]) == sorted({syntax.name for syntax in TABLE})


def test_a_text_between_tags_is_given_out_as_it_comes():
    """Up to what may end it, and to a closing tag within that may have been its end."""
    head = "<tool_call>\n<function=add>\n<parameter=note>\n"
    steps = {
        head: '{"note": "',
        'One "two"': 'One \\"two\\"',
        " \n": "",
        "three <": " \\nthree",
        "b> x": " <b> x",
        "</parameter> and": "",
        " more\n</parameter>\n</function>": '</parameter> and more"}',
        "\n</tool_call>": "",
    }
    parser = ReplyParser(table.QWEN_CODER, {"add": {"properties": {"note": {"type": "string"}}}})
    for text, expected in steps.items():
        parts = [part for part in parser.push(text) if isinstance(part, MoreArguments)]
        assert "".join(part.text for part in parts) == expected
