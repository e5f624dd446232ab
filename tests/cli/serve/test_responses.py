"""/v1/responses, asked by the openai package over loopback."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.api_clients import openai_client
from support.loopback_server import serving
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.runtime.engine import Engine

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def created(address: str, **options: Any) -> Any:
    return openai_client(address).responses.create(
        **{"model": "tiny", "input": "Rain in Paris?", **options}
    )


def streamed(address: str, **options: Any) -> tuple[list[Any], Any]:
    """The events, and the response that the last of them has."""
    events = list(created(address, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


def shape(response: Any) -> list[tuple[Any, ...]]:
    items: list[tuple[Any, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            items.append((item.type, item.name, item.arguments, item.status))
        else:
            items.append((item.type, "".join(part.text for part in item.content), item.status))
    return items


def test_a_real_engine_answers_whole_and_streamed():
    with Engine.demo("draft(n=3)", slots=1, n_threads=1, n_ctx=512) as engine:
        with serving(engine) as address:
            ask = {"max_output_tokens": 12, "temperature": 0.0}
            whole = created(address, **ask)
            events, last = streamed(address, **ask)
            counted = openai_client(address).responses.input_tokens.count(
                model="x", input="Rain in Paris?"
            )
            brief = created(address, instructions="Be brief.", **ask)
    assert whole.output_text
    assert shape(whole) == shape(last)
    assert whole.usage.output_tokens == last.usage.output_tokens > 0
    assert whole.usage.input_tokens == counted.input_tokens < brief.usage.input_tokens
    assert last.usage.input_tokens_details.cached_tokens > 0
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_the_order_of_events(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [f"<think>Hm.</think>Look.\n{CALL}"])
    with serving(engine) as address:
        events, response = streamed(address, tools=[WEATHER])
        whole = created(address, tools=[WEATHER])
    names = [event.type.removeprefix("response.") for event in events]
    kept = [name for k, name in enumerate(names) if name != names[k - 1]]  # deltas as one
    item, part = ("output_item.added", "content_part.added"), ("content_part.done",)
    assert kept == [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.done", *part, "output_item.done"),
        *(*item, "output_text.delta", "output_text.done", *part, "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    wanted = [
        ("reasoning", "Hm.", "completed"),
        ("message", "Look.", "completed"),
        ("function_call", "get_weather", '{"city": "Paris"}', "completed"),
    ]
    assert shape(response) == shape(whole) == wanted
    assert (response.status, whole.status) == ("completed", "completed")
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert not response.store
    ids = {item.id for item in response.output}
    assert len(ids) == 3
    assert {event.item_id for event in events if hasattr(event, "item_id")} == ids


def test_results_go_back(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [CALL, "Dry."])
    with serving(engine) as address:
        first = created(address, tools=[WEATHER])
        (call,) = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "no rain"}
        talk: list[Any] = [{"role": "user", "content": "Rain in Paris?"}]
        talk += [item.model_dump(exclude_none=True) for item in first.output]
        second = created(address, tools=[WEATHER], input=[*talk, output])
    assert second.output_text == "Dry."
    prompt = tool_vocabulary.detokenize(engine.asked[1].prompt)
    places = [prompt.index(part) for part in ("Rain in", '{"city": "Paris"}', "no rain")]
    assert places == sorted(places)


def test_what_the_model_said_before_is_one_message(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES)
    calls = [
        {"type": "function_call", "call_id": f"c{k}", "name": "get_weather", "arguments": "{}"}
        for k in range(2)
    ]
    talk: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        *calls,
        *({"type": "function_call_output", "call_id": f"c{k}", "output": "no"} for k in range(2)),
    ]
    with serving(engine) as address:
        created(address, input=talk, tools=[WEATHER], instructions="You help.")
    prompt = tool_vocabulary.detokenize(engine.asked[0].prompt)
    assert prompt.count("system\n") == 2  # the tools', and one of both
    assert "system\nYou help.\n\nBe brief." in prompt
    assert prompt.count("assistant\n") == 2  # what it said, and what it is to say
    assert prompt.count("<tool_call>\n{") == 2
    assert prompt.count("<tool_response>") == 2


def test_an_answer_that_is_cut_is_incomplete(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, ["one two three"])
    with serving(engine) as address:
        whole = created(address, max_output_tokens=3)
        events, last = streamed(address, max_output_tokens=3)
    assert whole.status == last.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"
    assert shape(whole) == shape(last) == [("message", "one", "incomplete")]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": 3}, "input"),
    "an item": ({"input": [3]}, "input[0]"),
    "a role": ({"input": [{"role": "x", "content": "a"}]}, "input[0].role"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
    ),
    "a call": ({"input": [{"type": "function_call"}]}, "input[0]"),
    "a result": ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
    "a choice": ({"tools": [WEATHER], "tool_choice": {"type": "x"}}, "tool_choice"),
    "what is stored": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "the background": ({"background": True}, "background"),
    "length": ({"max_output_tokens": -1}, "max_output_tokens"),
    "temperature": ({"temperature": "hot"}, "temperature"),
}


@pytest.mark.parametrize(("options", "field"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(silent, options, field):
    engine, address = silent
    with pytest.raises(openai.BadRequestError) as caught:
        created(address, **options)
    assert caught.value.param == field
    assert field in caught.value.message
    assert engine.asked == []
