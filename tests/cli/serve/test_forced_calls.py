"""Calls that have to come: the grammar makes a model that knows no tools call them, exactly so."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api_clients import openai_client
from support.api_replies import CHAT, MESSAGES, PATHS, RESPONSES, body_of, said_in
from support.hostile_grammars import reference_chain
from support.loopback_server import client_of, serving
from support.replies import follows
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES, LLAMA3, MISTRAL, QWEN_CODER, function_tool

from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.chat import ForcedCalls, Reply, ReplyParser, ReplyPlan, ThinkTags, syntax_of
from specrun.runtime.engine import Engine
from specrun.runtime.grammar import Grammar

pytestmark = pytest.mark.long

MISTRAL_V11 = MISTRAL + "{# name[ARGS]{} #}"
FAMILIES = {
    # A random model would think for ever.
    "hermes": HERMES[: HERMES.index("{% if enable_thinking")] + "{% endif %}",
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral v11": MISTRAL_V11,
    "qwen3-coder": QWEN_CODER,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER: Any = function_tool("get_weather")
WEATHER["function"]["parameters"] = {**CITY, "additionalProperties": False}
CLOCK: Any = function_tool("clock")
CLOCK["function"]["parameters"] = {"type": "object", "additionalProperties": False}
NOTE: Any = function_tool("note", text="string")
ASK: list[Any] = [{"role": "user", "content": "Rain?"}]


def strict(tool: Any) -> Any:
    return {**tool, "function": {**tool["function"], "strict": True}}


def takes(engine: Engine, grammar: Grammar | None, text: str) -> bool:
    """Whether a grammar takes a text, in which marks may be control tokens."""
    assert grammar is not None
    return follows(engine.vocabulary, grammar, text, marks=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model a family; its marks are control tokens in one of them."""
    folder = tmp_path_factory.mktemp("families")
    marks = ("[TOOL_CALLS]", "[ARGS]", "<|end|>")
    paths = {}
    for name, template in FAMILIES.items():
        controls = marks if name == "mistral v11" else ("<|end|>",)
        paths[name] = folder / f"{name}.gguf"
        spec = RandomLlama(
            vocab_size=320,
            controls=controls,
            chat_template=template,
            width=16,
            layers=1,
            context=2048,
        )
        write_random_llama(paths[name], spec)
    return paths


def created(address: str, **options: Any) -> Any:
    given: dict[str, Any] = {"model": "x", "messages": ASK, "tools": [WEATHER, CLOCK], **options}
    return openai_client(address).chat.completions.create(**given)


@pytest.mark.parametrize("family", ["hermes", "mistral v11", "qwen3-coder"])
def test_a_model_that_knows_no_tools_calls_them(models, family):
    """Marks as text, as control tokens, and tags; test_forced_families has the other forms."""
    named: Any = {"type": "function", "function": {"name": "clock"}}
    with Engine(models[family], "none", slots=1, n_threads=1, n_ctx=2048) as engine:
        with serving(engine) as address:
            replies = [
                created(address, tool_choice="required", seed=seed, parallel_tool_calls=False)
                for seed in range(4)
            ]
            clock = created(address, tool_choice=named, seed=1, parallel_tool_calls=False)
            calls = ""
            for chunk in created(address, tool_choice=named, seed=1, stream=True):
                delta = chunk.choices[0].delta
                assert not delta.content
                calls += "".join(call.function.name or "" for call in delta.tool_calls or [])
    for reply in (*replies, clock):
        (choice,) = reply.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        arguments = json.loads(call.function.arguments)
        if call.function.name == "clock":
            assert arguments == {}
        else:
            assert arguments["city"] in ("Paris", "Rome")
    assert clock.choices[0].message.tool_calls[0].function.name == "clock"
    assert calls.startswith("clock")


@pytest.mark.parametrize("family", ["hermes", "qwen3-coder"])
def test_parameters_that_are_deep_by_reference_end_no_server(models, family):
    deep: Any = function_tool("deep")
    deep["function"]["parameters"] = {
        **reference_chain(4000),
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "required": ["a"],
    }
    del deep["function"]["parameters"]["$ref"]
    with Engine(models[family], "none", slots=1, n_threads=1, n_ctx=2048) as engine:
        with serving(engine) as address:
            for asked in ("required", {"type": "function", "function": {"name": "deep"}}):
                with suppress(openai.BadRequestError):  # "$defs" beside the arguments of tags
                    created(address, tools=[deep], tool_choice=asked, max_tokens=4)
            assert created(address, max_tokens=1).choices


@pytest.mark.parametrize("thinking", [False, True], ids=["closed", "open"])
def test_what_is_forced_is_what_is_read(models, thinking):
    """Texts of the grammar parse as calls; texts beside it are not taken. No model is asked."""
    think = ThinkTags("<think>", "</think>")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, NOTE)}
    rome = '"arguments": {"city": "Rome"}}'
    texts = {
        "hermes": f'<tool_call>\n{{"name": "get_weather", {rome}\n</tool_call>',
        "llama3": '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        "mistral": f'[TOOL_CALLS][{{"name": "get_weather", {rome}]',
        "qwen3-coder": "<tool_call>\n<function=note>\n<parameter=text>\na\nb\n</parameter>\n"
        "</function>\n</tool_call>",
    }
    for family, text in texts.items():
        with Engine(models[family], "none", slots=1, n_threads=1, n_ctx=64) as engine:
            syntax = syntax_of(FAMILIES[family])
            forced = ForcedCalls(syntax.form, schemas, {})
            grammar = Grammar.lark(forced.grammar(think, thinking=thinking))
            whole = ("Hm.</think>\n" if thinking else "<think>Hm.</think>\n\n") + text
            for said, is_taken in ((whole, True), (whole + "x", False), (f"So: {text}", False)):
                assert takes(engine, grammar, said) is is_taken, (family, said)
            assert takes(engine, grammar, text) is not thinking
        parser, reply = ReplyParser(syntax, schemas, think=think, thinking=thinking), Reply()
        reply.add([*parser.push(whole), *parser.finish()])
        assert (len(reply.calls), reply.content, reply.reasoning) == (1, "", "Hm.")


def test_drafts_change_no_call(models):
    """Point masses keep the text for a seed, at temperature 1 and under a grammar, too."""
    said: dict[str, list[Any]] = {}
    for drafter in ("none", "prompt-lookup(n=4)"):
        with Engine(models["mistral"], drafter, slots=1, n_threads=1, n_ctx=2048) as engine:
            with serving(engine) as address:
                replies = [
                    created(address, tool_choice="required", seed=seed, temperature=1.0)
                    for seed in range(3)
                ]
        said[drafter] = [
            [call.function.model_dump() for call in reply.choices[0].message.tool_calls]
            for reply in replies
        ]
        if drafter != "none":
            drafted = [reply.usage.completion_tokens_details for reply in replies]
            assert sum(each.accepted_prediction_tokens for each in drafted) > 0
    assert said["none"] == said["prompt-lookup(n=4)"]


def test_several_calls_where_they_may(models):
    """A bias makes the model go on after a call, as far as it may."""
    with Engine(models["hermes"], "none", slots=1, n_threads=1, n_ctx=2048) as engine:
        bias = {str(token): -100 for token in engine.vocabulary.end_of_generation}
        asked = {"tools": [CLOCK], "tool_choice": "required", "max_tokens": 200, "seed": 1}
        with serving(engine) as address:
            many = created(address, **asked, logit_bias=bias).choices[0]
            single = created(address, **asked, logit_bias=bias, parallel_tool_calls=False).choices[
                0
            ]
    assert len(many.message.tool_calls) > 1
    assert len(single.message.tool_calls) == 1
    assert (many.finish_reason, single.finish_reason) == ("length", "tool_calls")


def test_a_schema_that_cannot_be_forced_is_named(models):
    tool: Any = function_tool("f")
    tool["function"]["parameters"] = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    with Engine(models["hermes"], "none", slots=1, n_threads=1, n_ctx=1024) as engine:
        with serving(engine) as address:
            with pytest.raises(openai.BadRequestError, match="cannot be forced") as caught:
                created(address, tools=[tool], tool_choice="required")
            assert created(address, tools=[tool], max_tokens=5).choices[0].message
    assert caught.value.param == "tools"


GOOD = {
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rome"}}',
    "mistral v11": 'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}',
    "qwen3-coder": "Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n"
    "</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("family", GOOD)
def test_what_begins_as_a_call_of_a_strict_tool_is_one(models, family):
    plan = ReplyPlan(
        syntax=syntax_of(FAMILIES[family]),
        schemas={"get_weather": WEATHER["function"]["parameters"], "note": {"type": "object"}},
        strict=frozenset({"get_weather"}),
    )
    good = GOOD[family]
    with Engine(models[family], "none", slots=1, n_threads=1, n_ctx=64) as engine:
        grammar = plan.grammar(engine.vocabulary, "")
        for text, is_taken in (
            (good, True),
            ("", True),
            ("It rains in Rome.", True),
            (good.replace("Rome", "Bonn"), False),
            (good.replace("get_weather", "rm"), False),
            (good[: len(good) // 2], False),
        ):
            assert takes(engine, grammar, text) is is_taken, text
        free = ReplyPlan(syntax=plan.syntax, schemas=plan.schemas)
        assert free.grammar(engine.vocabulary, "") is None


ANSWER = {
    "type": "object",
    "properties": {"rain": {"type": "boolean"}, "next": {"$ref": "#/$defs/day"}},
    "required": ["rain"],
    "additionalProperties": False,
    "$defs": {"day": {"enum": ["today", "tomorrow"]}},
}


@pytest.mark.parametrize("family", GOOD)
@pytest.mark.parametrize("is_strict", [False, True])
def test_tools_are_called_or_the_answer_follows_its_schema(models, family, is_strict):
    """Each in its own form, behind reasoning if there is any; and no other text."""
    plan = ReplyPlan(
        syntax=syntax_of(FAMILIES[family]),
        schemas={"get_weather": WEATHER["function"]["parameters"], "note": {"type": "object"}},
        strict=frozenset({"get_weather"} if is_strict else ()),
        think=ThinkTags("<think>", "</think>"),
    )
    call = GOOD[family].removeprefix("Hm.").lstrip()
    answer = '{"rain": true, "next": "today"}'
    with Engine(models[family], "none", slots=1, n_threads=1, n_ctx=64) as engine:
        grammar = plan.grammar(engine.vocabulary, "", ANSWER)
        open_grammar = plan.grammar(engine.vocabulary, "<think>\n", ANSWER)
        must_call = dataclasses.replace(plan, must_call=True)
        for text, is_taken in (
            (call, True),
            (answer, True),
            ('{\n  "rain": false\n}', True),
            (f"<think>Hm.</think>\n\n{call}", True),
            (f"<think>Hm.</think>\n\n{answer}", True),
            ("", False),
            ("It rains in Rome.", False),
            (f"So: {answer}", False),
            (answer.replace("true", "1"), False),
            (answer.replace("today", "never"), False),
            (call.replace("Rome", "Bonn"), False),
            (call.replace("get_weather", "rm"), False),
        ):
            assert takes(engine, grammar, text) is is_taken, text
        assert takes(engine, open_grammar, f"Hm.</think>\n{answer}")
        assert not takes(engine, open_grammar, answer)
        assert not takes(engine, must_call.grammar(engine.vocabulary, "", ANSWER), answer)
        assert takes(engine, must_call.grammar(engine.vocabulary, "", ANSWER), call)


@pytest.mark.parametrize("family", ["hermes", "qwen3-coder"])
def test_every_api_takes_tools_beside_an_answers_schema(models, family):
    """A random model calls, or answers: over a few seeds it does both."""
    schema = {**ANSWER, "required": ["rain", "next"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    asked: dict[str, dict[str, Any]] = {
        CHAT: {
            "response_format": {"type": "json_schema", "json_schema": form},
            "parallel_tool_calls": False,
        },
        RESPONSES: {"text": {"format": form}, "parallel_tool_calls": False},
        MESSAGES: {
            "max_tokens": 400,
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "output_config": {"format": form},
        },
    }
    kinds = set()
    with Engine(models[family], "none", slots=1, n_threads=1, n_ctx=2048) as engine:
        with client_of(engine) as client:
            for path, fields in asked.items():
                for seed in range(6):
                    body = {**body_of(path, "Rain?", [strict(WEATHER)]), **fields}
                    reply = client.post(path, json={**body, "seed": seed, "temperature": 1.5})
                    assert reply.status_code == 200, reply.text
                    said = said_in(reply.json())
                    assert bool(said.content) is not bool(said.calls)
                    if said.content:
                        assert list(json.loads(said.content)) == ["rain", "next"]
                    for _, arguments in said.calls:
                        assert arguments["city"] in ("Paris", "Rome")
                    kinds.add(bool(said.content))
    assert kinds == {False, True}


def test_a_schema_that_cannot_be_compiled_ends_no_other_call(models, caplog):
    bad: Any = function_tool("bad")
    bad["function"]["parameters"] = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    with Engine(models["hermes"], "none", slots=1, n_threads=1, n_ctx=2048) as engine:
        with serving(engine) as address:
            for seed in range(2):
                asked = {"tools": [bad, CLOCK], "tool_choice": "required", "seed": seed}
                (choice,) = created(address, **asked, max_tokens=300).choices
                assert not choice.message.content
            assert created(address, tools=[strict(bad), CLOCK], max_tokens=5).choices[0].message
    said = [each.getMessage() for each in caplog.records if "calls of bad" in each.getMessage()]
    assert len(said) == 1
    assert "do not follow its schema: the JSON schema cannot be compiled" in said[0]


def test_definitions_are_followed_in_arguments_that_are_tags(models):
    schema = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/few"}},
        "required": ["n"],
        "$defs": {"few": {"type": "integer", "maximum": 3, "minimum": 1}},
    }
    plan = ReplyPlan(syntax=syntax_of(QWEN_CODER), schemas={"f": schema}, must_call=True)
    text = "<tool_call>\n<function=f>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
    with Engine(models["qwen3-coder"], "none", slots=1, n_threads=1, n_ctx=64) as engine:
        grammar = plan.grammar(engine.vocabulary, "")
        assert takes(engine, grammar, text)
        assert not takes(engine, grammar, text.replace("2", "4"))


def test_strict_is_read_from_every_api(tool_vocabulary):
    engine: Any = ScriptedEngine(tool_vocabulary, HERMES)
    with client_of(engine) as client:
        for path in PATHS:
            body = body_of(path, "Rain?", [strict(WEATHER)])
            body["tools"][0] |= {"strict": True} if path == MESSAGES else {}
            assert client.post(path, json=body).status_code == 200
    assert [each.params.grammar.kind for each in engine.asked] == ["lark"] * 3


def test_schemas_of_a_hundred_thousand_characters(models):
    """llama.cpp's grammars of tools fail above about as many."""
    schemas = {
        f"tool_{number}": {
            "type": "object",
            "properties": {
                f"field_{number}_{k}": {"enum": [f"{number} {k} {value}" for value in range(20)]}
                for k in range(8)
            },
        }
        for number in range(64)
    }
    assert len(json.dumps(schemas)) > 100_000
    plan = ReplyPlan(syntax=syntax_of(HERMES), schemas=schemas, must_call=True)
    text = '<tool_call>\n{"name": "tool_63", "arguments": {"field_63_7": "63 7 19"}}\n</tool_call>'
    with Engine(models["hermes"], "none", slots=1, n_threads=1, n_ctx=64) as engine:
        grammar = plan.grammar(engine.vocabulary, "")
        assert takes(engine, grammar, text)
        assert not takes(engine, grammar, text.replace("7 19", "7 20"))
