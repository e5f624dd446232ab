"""Tools and reasoning in chat completions, asked for by the openai package over loopback."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import openai
import pytest
from support.api_clients import openai_client
from support.api_replies import body_of, said_in, said_in_stream
from support.commands import run
from support.loopback_server import client_of, serving
from support.scripted_engine import ScriptedEngine
from support.tiny_models import CONTROLS, TEMPLATE
from support.tool_templates import ADD, HERMES, LLAMA3, MISTRAL, WEATHER

from specrun.convert.gguf import Metadata
from specrun.convert.random_model import RandomLlama, synthetic_vocabulary, write_random_llama
from specrun.convert.tokenizer import BytePairVocabulary
from specrun.runtime.chat import ChatTemplate, for_template, syntax_of
from specrun.runtime.engine import Engine

CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
ASK: list[Any] = [{"role": "user", "content": "Rain in Paris?"}]
CALLS = {
    "hermes": f"I look.\n<tool_call>\n{CALL}\n</tool_call>",
    "mistral": 'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
}


def created(address: str, **options: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "messages": ASK, **options}
    return openai_client(address).chat.completions.create(**given)


def streamed(address: str, **options: Any) -> tuple[str, str, list[dict[str, str]], str | None]:
    """What a client puts together: content, reasoning, calls, and why it ended."""
    content = reasoning = ""
    calls: list[dict[str, str]] = []
    finish = None
    for chunk in created(address, stream=True, **options):
        (choice,) = chunk.choices
        delta = choice.delta
        content += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


def test_calls_whole_and_streamed(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [CALLS["hermes"]])
    with serving(engine) as address:
        whole = created(address, tools=[WEATHER, ADD])
        content, _, calls, finish = streamed(address, tools=[WEATHER, ADD])
    (choice,) = whole.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, finish) == ("tool_calls", "tool_calls")
    assert choice.message.content == content == "I look."
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    assert call.id != calls[0]["id"]
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 3
    rendered = tool_vocabulary.detokenize(engine.asked[0].prompt)
    assert "get_weather" in rendered
    assert "Rain in Paris?" in rendered


def test_a_conversation_with_results_goes_on(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, MISTRAL, [CALLS["mistral"], "No rain."])
    with serving(engine) as address:
        first = created(address, tools=[WEATHER]).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "dry"}
        messages = [*ASK, first.model_dump(exclude_none=True), result]
        second = created(address, messages=messages, tools=[WEATHER]).choices[0]
        # Another server's ids are as long as they like.
        other = json.loads(json.dumps(messages).replace(first.tool_calls[0].id, "call_1234567"))
        third = created(address, messages=other, tools=[WEATHER]).choices[0]
    assert (second.message.content, second.finish_reason) == ("No rain.", "stop")
    assert third.message.content == "No rain."
    rendered = tool_vocabulary.detokenize(engine.asked[1].prompt)
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}' in rendered
    assert '{"content": "dry", "call_id": "' in rendered


def test_one_call_at_a_time_ends_the_answer(tool_vocabulary):
    text = f"<tool_call>{CALL}</tool_call>" * 3 + "x" * 200
    engine = ScriptedEngine(tool_vocabulary, HERMES, [text])
    with serving(engine) as address:
        all_calls = streamed(address, tools=[WEATHER])
        engine.cancelled.clear()
        first = streamed(address, tools=[WEATHER], parallel_tool_calls=False)
        assert engine.cancelled.wait(10)  # nobody waits for the rest
    assert (len(all_calls[2]), all_calls[0]) == (3, "x" * 200)
    assert (len(first[2]), first[0], first[3]) == (1, "", "tool_calls")


def test_no_tools_where_none_are_to_be_called(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [CALLS["hermes"]])
    with serving(engine) as address:
        content, _, calls, finish = streamed(address, tools=[WEATHER], tool_choice="none")
        plain = streamed(address)
    assert (content, calls, finish) == (CALLS["hermes"], [], "stop")
    assert plain[0] == CALLS["hermes"]
    assert "get_weather" not in tool_vocabulary.detokenize(engine.asked[0].prompt)


def test_only_the_allowed_tools_are_called(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [CALLS["hermes"]])
    with serving(engine) as address:
        for names, n_calls in ((["get_weather"], 1), (["add"], 0), ([], 0)):
            listed = [{"type": "function", "function": {"name": name}} for name in names]
            allowed = {"mode": "auto", "tools": listed}
            choice = {"type": "allowed_tools", "allowed_tools": allowed}
            _, _, calls, _ = streamed(address, tools=[WEATHER, ADD], tool_choice=choice)
            assert len(calls) == n_calls
    # All are shown, so that the prompt is the same and is not read again.
    assert engine.asked[0].prompt == engine.asked[1].prompt == engine.asked[2].prompt


def test_a_call_that_was_cut_short_ends_for_its_length(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [f"<tool_call>{CALL}</tool_call>"])
    with serving(engine) as address:
        _, _, calls, finish = streamed(address, tools=[WEATHER], max_tokens=55)
    assert (finish, len(calls)) == ("length", 1)
    assert '{"city": "Paris"}'.startswith(calls[0]["arguments"])


THINKING = "<think>\nIt may rain.\n</think>\n\nYes."


def test_reasoning_is_split_from_content(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [THINKING])
    with serving(engine) as address:
        message = created(address)
        content, reasoning, _, _ = streamed(address)
        body = {"reasoning_format": "none"}
        unsplit, nothing, _, _ = streamed(address, extra_body=body)
    assert message.choices[0].message.content == content == "Yes."
    assert message.choices[0].message.model_extra["reasoning_content"] == reasoning
    assert reasoning == "It may rain."
    assert (unsplit, nothing) == (THINKING, "")  # as it was written, control tokens by name


HARMONY = (
    "<|channel|>analysis<|message|>It may rain.<|end|><|start|>assistant<|channel|>final"
    "<|message|>Yes."
)
THOUGHTS = {
    "tags": (HERMES, THINKING, THINKING),
    "messages": (
        "{# <|channel|>analysis<|message|> #}" + HERMES,
        HARMONY,
        "<|channel|>analysis<|message|>It may rain.<|end|>Yes.",
    ),
}
EXCLUDED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"reasoning": {"exclude": True}},
        {"include_reasoning": False},
        {"reasoning_format": "hidden"},
        {"thinking": {"type": "enabled", "display": "omitted"}, "reasoning_format": "none"},
    ],
    "/v1/responses": [{"reasoning": {"exclude": True}}, {"include_reasoning": False}],
    "/v1/messages": [
        {"thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}},
        {"include_reasoning": False},
    ],
}


@pytest.mark.parametrize("path", EXCLUDED)
@pytest.mark.parametrize("family", THOUGHTS)
def test_every_api_leaves_reasoning_out_or_in_the_content(tool_vocabulary, path: str, family: str):
    template, said, kept = THOUGHTS[family]
    engine: Any = ScriptedEngine(tool_vocabulary, template, [said])
    body = body_of(path, "Rain?")
    n_thought = len(tool_vocabulary.tokenize("It may rain.", add_special=False))
    with client_of(engine) as client:

        def reply(**fields: Any) -> tuple[str, str]:
            whole = client.post(path, json={**body, **fields}).json()
            stream = client.post(path, json={**body, **fields, "stream": True})
            said = said_in(whole)
            assert said_in_stream(path, stream.content) == said
            usage = whole["usage"]
            details = usage.get("completion_tokens_details", usage.get("output_tokens_details"))
            if path != "/v1/messages":  # which has no such count
                assert details["reasoning_tokens"] == (n_thought if said.content == "Yes." else 0)
            return said.reasoning, said.content

        assert reply() == ("It may rain.", "Yes.")
        for fields in EXCLUDED[path]:
            assert reply(**fields) == ("", "Yes.")
        assert reply(reasoning_format="parsed", include_reasoning=True) == ("It may rain.", "Yes.")
        for form in ("none", "raw"):
            assert reply(reasoning_format=form) == ("", kept)


def test_template_kwargs_reach_the_template_and_open_the_reasoning(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, ["It may.</think>Yes.", "Yes."])
    with serving(engine) as address:
        body: dict[str, Any] = {"chat_template_kwargs": {"open_thinking": True}}
        content, reasoning, _, _ = streamed(address, extra_body=body)
        body = {"chat_template_kwargs": {"enable_thinking": False}}
        closed = streamed(address, extra_body=body)
    assert (content, reasoning) == ("Yes.", "It may.")
    assert closed[:2] == ("Yes.", "")
    assert tool_vocabulary.detokenize(engine.asked[1].prompt).endswith("\n\n</think>\n\n")


def test_the_server_may_set_variables_of_the_template(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, ["Yes."])
    with serving(engine, template_kwargs={"enable_thinking": False}) as address:
        streamed(address)
        streamed(address, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    off, on = (tool_vocabulary.detokenize(asked.prompt) for asked in engine.asked)
    assert (off.endswith("</think>\n\n"), on.endswith("assistant\n")) == (True, True)


OFF: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenAI's word": ("/v1/chat/completions", {"reasoning_effort": "none"}),
    "OpenRouter's word": ("/v1/chat/completions", {"reasoning": {"effort": "none"}}),
    "OpenRouter's switch": ("/v1/chat/completions", {"reasoning": {"enabled": False}}),
    "OpenRouter's budget": ("/v1/chat/completions", {"reasoning": {"max_tokens": 0}}),
    "a vendor's switch": ("/v1/chat/completions", {"thinking": {"type": "disabled"}}),
    "responses": ("/v1/responses", {"reasoning": {"effort": "none", "summary": "auto"}}),
    "messages": ("/v1/messages", {"thinking": {"type": "disabled"}}),
    "messages, an effort": ("/v1/messages", {"output_config": {"effort": "none"}}),
}


@pytest.mark.parametrize(("path", "fields"), OFF.values(), ids=OFF)
def test_every_api_turns_thinking_off_and_on(tool_vocabulary, path, fields):
    engine: Any = ScriptedEngine(tool_vocabulary, HERMES)
    body = body_of(path, "Rain?")
    on = json.loads(
        json.dumps(fields)
        .replace("none", "high")
        .replace("disabled", "enabled")
        .replace("false", "true")
        .replace("0", "9")
    )
    with client_of(engine) as client:
        for each in ({}, fields, on, {**fields, "chat_template_kwargs": {"enable_thinking": True}}):
            assert client.post(path, json={**body, **each}).status_code == 200
    ends = [tool_vocabulary.detokenize(asked.prompt)[-11:] for asked in engine.asked]
    assert [end.endswith("</think>\n\n") for end in ends] == [False, True, False, False]


def test_the_option_takes_an_object():
    for text in ("{", "[1]", "x"):
        result = run("serve", "--demo", "--chat-template-kwargs", text)
        assert result.exit_code == 2
        assert "no JSON object" in result.stderr


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tools": ({"tools": "x"}, "tools"),
    "a tool": ({"tools": [1]}, "tools[0]"),
    "a name": ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    "parameters": (
        {"tools": [{"function": {"name": "f", "parameters": 1}}]},
        "tools[0].function.parameters",
    ),
    "two of a name": ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    "a choice": ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
    "allowed tools": (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": [1]}},
        "tool_choice",
    ),
    "a choice of nothing": ({"tool_choice": "required"}, "tool_choice"),
    "a choice of another": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice",
    ),
    "old functions": ({"functions": [{}]}, "functions"),
    "a call in the history": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages[1].tool_calls[0]",
    ),
    "kwargs": ({"extra_body": {"chat_template_kwargs": 1}}, "chat_template_kwargs"),
    "an effort": ({"extra_body": {"reasoning_effort": 3}}, "reasoning_effort"),
    "reasoning": ({"extra_body": {"reasoning": {"max_tokens": -1}}}, "reasoning.max_tokens"),
    "a format": ({"extra_body": {"reasoning_format": "x"}}, "reasoning_format"),
}


@pytest.mark.parametrize(("options", "field"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(silent, options, field):
    engine, address = silent
    with pytest.raises(openai.BadRequestError) as caught:
        created(address, **options)
    assert caught.value.param == field
    assert field in caught.value.message
    assert engine.asked == []


def test_what_a_template_refuses_is_a_bad_request(tool_vocabulary):
    refusal = "{% if messages | length > 1 %}{{ raise_exception('one by one') }}{% endif %}"
    engine = ScriptedEngine(tool_vocabulary, HERMES + refusal)
    talk: list[Any] = [*ASK, {"role": "assistant", "content": "Dry."}, *ASK]
    with serving(engine) as address, pytest.raises(openai.BadRequestError, match="one by one"):
        created(address, messages=talk, tools=[ADD])


def test_two_calls_of_one_turn_come_in_turn_where_a_template_takes_one(tool_vocabulary):
    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": each, "type": "function", "function": function} for each in "pq"]
    results = [{"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in "qp"]
    talk: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    engine = ScriptedEngine(tool_vocabulary, LLAMA3)
    with serving(engine) as address:
        created(address, messages=talk, tools=[ADD])
    prompt = tool_vocabulary.detokenize(engine.asked[0].prompt)
    told = prompt[prompt.index("<|start_header_id|>assistant") :]
    parts = ['{"name": "add"', "of p", '{"name": "add"', "of q", "assistant"]
    places = [told.index(parts[0])]
    for part in parts[1:]:
        places.append(told.index(part, places[-1] + 1))
    assert told.count("of p") == told.count("of q") == 1


GENERIC_CALL = '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]}'


def test_a_template_without_tools_has_them_in_words(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, TEMPLATE, [GENERIC_CALL, "No rain."])
    with serving(engine) as address:
        first = created(address, tools=[WEATHER]).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "dry"}
        messages = [*ASK, first.model_dump(exclude_none=True), result]
        second = created(address, messages=messages, tools=[WEATHER]).choices[0]
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert (second.message.content, second.finish_reason) == ("No rain.", "stop")
    rendered = tool_vocabulary.detokenize(engine.asked[1].prompt)
    for part in (json.dumps(WEATHER["function"]), GENERIC_CALL, "dry"):
        assert part in rendered


@pytest.mark.parametrize("name", ["xml_tools", "custom_tools", "functions"])
def test_templates_that_call_tools_by_another_name(tool_vocabulary, name):
    template = f"{{{{ {name} }}}}{TEMPLATE}"
    engine = ScriptedEngine(tool_vocabulary, template, [GENERIC_CALL])
    with serving(engine) as address:
        (choice,) = created(address, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    rendered = tool_vocabulary.detokenize(engine.asked[0].prompt)
    assert "get_weather" in rendered.partition("Rain in")[0]
    assert "You may call" not in rendered


def test_tools_that_a_template_reads_in_the_systems_message(tool_vocabulary):
    template = TEMPLATE + "{% for message in messages %}{{ message['tools'] }}{% endfor %}"
    for asked in (ASK, [{"role": "system", "content": "Be short."}, *ASK]):
        engine = ScriptedEngine(tool_vocabulary, template, [GENERIC_CALL])
        with serving(engine) as address:
            (choice,) = created(address, messages=asked, tools=[WEATHER]).choices
        assert choice.finish_reason == "tool_calls"
        rendered = tool_vocabulary.detokenize(engine.asked[0].prompt)
        assert json.dumps([WEATHER["function"]]) in rendered
        assert "You may call" not in rendered


QUIET = {
    "a template that opens the reasoning": (
        TEMPLATE.replace("<|end|>", "<|end|>{# <think> </think> #}") + "<think>\n",
        "\n\n</think>\n\n",
    ),
    "one that leaves it to the model": (
        TEMPLATE + "{% if false %}<think></think>{% endif %}",
        "\n\n</think>\n\n",
    ),
    "one that does not know it": (TEMPLATE, "?"),
}


@pytest.mark.parametrize(("template", "end"), QUIET.values(), ids=QUIET)
def test_thinking_is_turned_off_where_no_variable_does_it(tool_vocabulary, template, end):
    engine = ScriptedEngine(tool_vocabulary, template, ["Yes."])
    with serving(engine) as address:
        quiet = streamed(address, extra_body={"reasoning_effort": "none"})
        streamed(address)
    assert quiet[:2] == ("Yes.", "")
    off, on = (tool_vocabulary.detokenize(asked.prompt) for asked in engine.asked)
    assert off.endswith(end) or end == "?"
    assert (off == on) is (end == "?")


def test_ids_that_a_model_writes_itself():
    syntax = syntax_of("<|tool_calls_section_begin|>")
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    asked = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "id": "a"}, {**call, "id": "b"}],
    }
    told = for_template([asked, {"role": "tool", "tool_call_id": "b", "content": "2"}], syntax)
    assert [call["id"] for call in told[0]["tool_calls"]] == ["functions.add:0", "functions.add:1"]
    assert told[1]["tool_call_id"] == "functions.add:1"


def test_a_second_template_is_taken_for_tools(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, TEMPLATE, [CALLS["hermes"]])
    engine.tool_template = ChatTemplate(HERMES)
    with serving(engine) as address:
        called = created(address, tools=[WEATHER]).choices[0]
        plain = created(address).choices[0]
    assert (called.finish_reason, plain.finish_reason) == ("tool_calls", "stop")
    with_tools, without = (tool_vocabulary.detokenize(asked.prompt) for asked in engine.asked)
    assert ("get_weather" in with_tools, "get_weather" in without) == (True, False)


class TwoTemplates(BytePairVocabulary):
    """A vocabulary that comes with a second template, as some files have it."""

    def describe(self, metadata: Metadata) -> None:
        super().describe(metadata)
        metadata.text("tokenizer.chat_template.tool_use", HERMES)


def test_a_file_may_have_two_templates(tmp_path, tiny_model):
    plain = synthetic_vocabulary(320, controls=CONTROLS, chat_template=TEMPLATE)
    vocabulary = TwoTemplates(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    path = tmp_path / "two templates.gguf"
    write_random_llama(path, RandomLlama(vocabulary=vocabulary, width=16, layers=1))
    options: dict[str, Any] = {"slots": 1, "n_threads": 1, "n_ctx": 64}
    with Engine(path, "none", **options) as engine:
        assert engine.tool_template.source == HERMES
        assert engine.chat_template.source == TEMPLATE
    with Engine(path, "none", **options, chat_template=MISTRAL) as engine:
        assert engine.tool_template.source == MISTRAL
    with Engine(tiny_model, "none", **options) as engine:
        assert engine.tool_template is engine.chat_template
