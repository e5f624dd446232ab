"""Answers to chats in Python: text, reasoning and tool calls apart, the raw text beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted_model import write_scripted

from specrun.runtime import (
    ChatResult,
    Engine,
    GenerationStream,
    OptionError,
    Runtime,
    SamplingParams,
)
from specrun.runtime.chat import CallBegun, MoreArguments
from specrun.runtime.round import TokenEvent

ASK: list[dict[str, Any]] = [{"role": "user", "content": "Rain in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
THOUGHT, SAID, LAST = "Who knows that?", "I look it up.", "Bring an umbrella."
RAW = {
    "tags": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n<tool_call>\n{CALL}\n</tool_call>",
    "messages": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>"
    f"commentary<|message|>{SAID}<|end|><|start|>assistant<|channel|>commentary to="
    'functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
}
MARKS = {
    "tags": "{# <think> </think> #}",
    "messages": "{# <|channel|> <|message|> <|channel|>analysis<|message|> #}",
}


@pytest.fixture(scope="module", params=RAW)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripted") / "model.gguf"
    write_scripted(path, [RAW[family], LAST], context=2048)
    return path


def options_of(model: Path, family: str) -> dict[str, Any]:
    with Runtime(model, n_ctx=512, trust=True) as runtime:
        template = runtime.chat_template.source
    chosen = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "trust": True}
    return {**chosen, "chat_template": f"{MARKS[family]}{template}"}


@pytest.fixture(scope="module", params=[Runtime, Engine], ids=["runtime", "engine"])
def opened(request: pytest.FixtureRequest, model: Path, family: str) -> Iterator[Runtime | Engine]:
    with request.param(model, "prompt-lookup", **options_of(model, family)) as opened:
        yield opened


def by_iterating(stream: GenerationStream) -> list[TokenEvent]:
    return list(stream)


def by_handing(stream: GenerationStream) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    stream.hand_to(events.append)
    return events


def by_rounds(stream: GenerationStream) -> list[TokenEvent]:
    async def read() -> list[TokenEvent]:
        return [event async for events in stream.rounds() for event in events]

    return asyncio.run(read())


@pytest.mark.parametrize("read", [by_iterating, by_handing, by_rounds])
def test_parts_of_an_answer_with_a_call(
    opened: Runtime | Engine,
    family: str,
    read: Callable[[GenerationStream], list[TokenEvent]],
) -> None:
    stream = opened.stream_chat(ASK, tools=TOOLS)
    events, result = read(stream), stream.result
    assert isinstance(result, ChatResult)
    assert (result.text, result.reasoning, result.raw_text) == (SAID, THOUGHT, RAW[family])
    (call,) = result.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert "".join(event.text for event in events) == SAID
    assert "".join(event.reasoning for event in events) == THOUGHT
    assert "".join(event.raw_text for event in events) == RAW[family]
    parts = [part for event in events for part in event.parts]
    assert [part for part in parts if isinstance(part, CallBegun)] == [CallBegun(0, "weather")]
    assert [event.token_id for event in events] == result.token_ids
    assert [event.finish_reason for event in events][-2:] == [None, "stop"]
    assert events[0].logprob > -0.01
    whole = opened.chat(ASK, tools=TOOLS, params=SamplingParams(seed=result.seed))
    again = (whole.text, whole.reasoning, whole.tool_calls, whole.raw_text)
    assert again == (result.text, result.reasoning, result.tool_calls, result.raw_text)


def test_what_was_handed_out_can_be_sent_back(opened: Runtime | Engine) -> None:
    result = opened.chat(ASK, tools=TOOLS)
    (call,) = result.tool_calls
    told = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    after = opened.chat([*ASK, result.message, told], tools=TOOLS)
    assert (after.text, after.reasoning, after.tool_calls) == (LAST, "", [])
    assert after.message == {"role": "assistant", "content": LAST}
    assert after.usage.cached_tokens >= result.usage.prompt_tokens


ROME = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OTHERS = [{"type": "function", "function": {"name": name, "parameters": ROME}} for name in "ab"]


@pytest.fixture(scope="module")
def plain(model: Path, family: str) -> Iterator[Runtime]:
    """The runtime of a model that does not think."""
    template = options_of(model, family)["chat_template"].removeprefix(MARKS[family])
    options = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "trust": True}
    with Runtime(model, "none", **options, chat_template=template) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", "ab"),
        ({"type": "function", "function": {"name": "b"}}, "b"),
        ({"type": "allowed_tools", "mode": "required", "tools": [OTHERS[0]]}, "a"),
    ],
    ids=["required", "named", "allowed"],
)
def test_a_call_comes_if_it_has_to(plain: Runtime, choice: Any, names: str) -> None:
    result = plain.chat(ASK, tools=OTHERS, tool_choice=choice, max_tokens=100)
    assert result.text == ""
    first, *others = result.tool_calls
    assert first.name in names
    assert {call.name for call in others} <= {*names}
    assert json.loads(first.arguments) == {"city": "Rome"}


def test_no_call_comes_if_none_is_wanted(opened: Runtime | Engine) -> None:
    assert not opened.chat(ASK, tools=TOOLS, tool_choice="none").tool_calls
    for tools, choice, problem in (
        (TOOLS, "always", "tool_choice is 'always': give auto, none, required"),
        ([], "required", "there are no tools"),
        (TOOLS, {"type": "function", "function": {"name": "clock"}}, "names 'clock'"),
    ):
        with pytest.raises(OptionError, match=problem):
            opened.stream_chat(ASK, tools=tools, tool_choice=choice)


def test_calls_of_a_strict_tool_follow_its_schema(opened: Runtime | Engine) -> None:
    strict = {"name": "weather", "parameters": ROME, "strict": True}
    result = opened.chat(ASK, tools=[{"type": "function", "function": strict}], max_tokens=300)
    assert (result.reasoning, result.text) == (THOUGHT, SAID)
    assert [json.loads(call.arguments) for call in result.tool_calls][:1] == [{"city": "Rome"}]


def test_a_prompt_that_is_no_chat_is_raw(opened: Runtime | Engine, family: str) -> None:
    result = opened.generate(opened.chat_prompt(ASK, TOOLS))
    assert not isinstance(result, ChatResult)
    assert result.text == RAW[family]


def test_a_call_that_was_cut_stays_cut(opened: Runtime | Engine, family: str) -> None:
    whole = opened.chat(ASK, tools=TOOLS)
    n = len(whole.token_ids)
    for most in range(n - 8, n):
        stream = opened.stream_chat(ASK, tools=TOOLS, max_tokens=most)
        events, result = list(stream), stream.result
        assert isinstance(result, ChatResult)
        assert whole.raw_text.startswith(result.raw_text)
        parts = [part for event in events for part in event.parts]
        told = "".join(part.text for part in parts if isinstance(part, MoreArguments))
        assert told == "".join(call.arguments for call in result.tool_calls)
        assert whole.tool_calls[0].arguments.startswith(told)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": [{"name": "weather"}]}, "tools is"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_wrong_tools_and_variables(
    opened: Runtime | Engine, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(OptionError, match=named):
        opened.chat(ASK, **given)


def test_a_history_with_a_wrong_call(opened: Runtime | Engine) -> None:
    wrong = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    with pytest.raises(OptionError, match="tool_calls is"):
        opened.chat([*ASK, wrong, {"role": "tool", "content": "x"}])
