"""/v1/messages, asked by the anthropic package over loopback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api_clients import anthropic_client
from support.loopback_server import serving
from support.scripted_engine import ScriptedEngine
from support.tiny_models import TEMPLATE
from support.tool_templates import HERMES

from specrun.runtime.engine import Engine


@pytest.fixture(autouse=True, scope="module")
def anthropic() -> Any:
    """The package, imported when a test needs it: this takes two seconds."""
    return pytest.importorskip("anthropic")


ASK: list[Any] = [{"role": "user", "content": "Rain in Paris?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
GREEDY = {"temperature": 0.0}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def created(address: str, **options: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": ASK, **options}
    return anthropic_client(address).messages.create(**given)


def streamed(address: str, **options: Any) -> tuple[list[str], Any]:
    """The names of the events, and the message that the client made of them."""
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": ASK, **options}
    with anthropic_client(address).messages.stream(**given) as stream:
        raw = {"message_start", "content_block_start", "content_block_delta"}
        raw |= {"content_block_stop", "message_delta", "message_stop"}
        names = [event.type for event in stream if event.type in raw]
        return names, stream.get_final_message()


def blocks(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True, exclude={"id"}) for block in message.content]


def test_a_real_engine_answers_whole_and_streamed():
    with Engine.demo("draft(n=3)", slots=1, n_threads=1, n_ctx=512) as engine:
        with serving(engine) as address:
            whole = created(address, max_tokens=12, extra_body=GREEDY)
            names, message = streamed(address, max_tokens=12, extra_body=GREEDY)
            again = created(address, max_tokens=12, extra_body=GREEDY, stream=True)
            begins = next(iter(again)).message.usage
            longer = created(
                address,
                max_tokens=12,
                extra_body=GREEDY,
                system="Be brief.",
                stop_sequences=["zzz"],
            )
            counted = anthropic_client(address).messages.count_tokens(model="tiny", messages=ASK)
    assert whole.role == "assistant"
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert blocks(whole) == blocks(message)
    assert whole.content[0].text
    assert names[0] == "message_start"
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert message.usage.output_tokens == whole.usage.output_tokens > 0
    assert counted.input_tokens == (whole.usage.input_tokens + whole.usage.cache_read_input_tokens)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == (
        counted.input_tokens
    )
    assert message.usage.cache_read_input_tokens > 0  # the second time the prompt is known
    assert begins.cache_read_input_tokens == message.usage.cache_read_input_tokens
    assert begins.input_tokens == message.usage.input_tokens
    assert longer.usage.input_tokens + longer.usage.cache_read_input_tokens > counted.input_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_use(tool_vocabulary, stream):
    text = f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
    engine = ScriptedEngine(tool_vocabulary, HERMES, [text])
    with serving(engine) as address:
        if stream:
            names, message = streamed(address, tools=[WEATHER])
            starts = names.count("content_block_start")
            assert starts == names.count("content_block_stop") == 4
        else:
            message = created(address, tools=[WEATHER])
    use = {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}
    assert blocks(message) == [
        {"type": "thinking", "thinking": "I look.", "signature": ""},
        {"type": "text", "text": "One moment."},
        use,
        use,
    ]
    assert message.stop_reason == "tool_use"
    assert message.content[2].id != message.content[3].id
    assert "get_weather" in tool_vocabulary.detokenize(engine.asked[0].prompt)


def test_results_go_back_to_the_template(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, ["Dry."])
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
    ]
    result = [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [{"type": "text", "text": "no rain"}],
        },
        {"type": "text", "text": "And so?"},
    ]
    talk = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": result}]
    with serving(engine) as address:
        message = created(
            address,
            messages=talk,
            tools=[WEATHER],
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        )
    assert blocks(message) == [{"type": "text", "text": "Dry."}]
    assert message.stop_reason == "end_turn"
    prompt = tool_vocabulary.detokenize(engine.asked[0].prompt)
    places = [prompt.index(part) for part in ("Rain in", '{"city": "Paris"}', "no rain", "And so?")]
    assert places == sorted(places)


def test_one_call_at_a_time_and_none(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [CALL + CALL])
    with serving(engine) as address:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        single = created(address, tools=[WEATHER], tool_choice=choice)
        none = created(address, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block["type"] for block in blocks(single)] == ["tool_use"]
    assert blocks(none) == [{"type": "text", "text": CALL + CALL}]


def test_the_reason_of_the_end(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, ["one two three<|end|>"])
    with serving(engine) as address:
        ended = created(address)
        stopped = created(address, stop_sequences=["###", " thr"])
        cut = created(address, max_tokens=3)
        _, message = streamed(address, stop_sequences=["two"])
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " thr")
    assert stopped.content[0].text == "one two"
    assert cut.stop_reason == "max_tokens"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")


def test_an_empty_answer_is_an_empty_block(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES, ["<|end|>"])
    with serving(engine) as address:
        empty = [{"type": "text", "text": ""}]
        assert blocks(created(address)) == empty
        assert blocks(streamed(address)[1]) == empty


def test_a_key_is_asked_for_as_anthropic_sends_it(anthropic, tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES)
    ask = {"model": "tiny", "max_tokens": 5, "messages": ASK}
    with serving(engine, api_keys=("secret",)) as address:
        assert anthropic_client(address, "secret").messages.create(**ask).content
        with pytest.raises(anthropic.AuthenticationError) as caught:
            anthropic_client(address, "wrong").messages.create(**ask)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_the_models_are_listed_for_its_clients(silent):
    _, address = silent
    (model,) = anthropic_client(address).models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    assert model.created_at.year >= 2025
    assert anthropic_client(address).models.retrieve("tiny").id == "tiny"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
    "content": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    "a result": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    "a call": (
        {"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use"}]}]},
        "messages[1].content[0]",
    ),
    "a schema": ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
    "a choice": ({"tools": [WEATHER], "tool_choice": {"type": "x"}}, "tool_choice.type"),
    "temperature": ({"extra_body": {"temperature": "hot"}}, "temperature"),
    "stop": ({"stop_sequences": [1]}, "stop_sequences"),
    "thinking": ({"thinking": {"type": "x"}}, "thinking.type"),
}


@pytest.mark.parametrize(("options", "field"), WRONG.values(), ids=WRONG)
def test_errors_have_anthropics_form(anthropic, silent, options, field):
    engine, address = silent
    with pytest.raises(anthropic.BadRequestError) as caught:
        created(address, **options)
    body = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]
    assert engine.asked == []


def test_a_path_that_is_none(anthropic, tool_vocabulary):
    with serving(ScriptedEngine(tool_vocabulary, TEMPLATE)) as address:
        with pytest.raises(anthropic.NotFoundError) as caught:
            anthropic_client(address).post("/v1/messages/nothing", body={}, cast_to=object)
    assert json.loads(caught.value.response.text)["error"]["type"] == "not_found_error"
