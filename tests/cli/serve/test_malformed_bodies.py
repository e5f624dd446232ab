"""Bodies with anything anywhere, to every API: answered, or refused in the API's own form."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES, WEATHER

from specrun.bindings.models.model import Model
from specrun.cli.serve.app import create_app
from specrun.cli.serve.settings import ServeSettings
from specrun.convert.random_model import RandomLlama, write_random_llama

CONTROLS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|end|>")
TOOL = {"name": "f", "description": "x", "input_schema": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_format": "auto",
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}
                ],
            },
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "max_tokens": 5,
    },
    "/v1/responses": {
        "instructions": "x",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
    },
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": [{"filename": "f", "text": "x"}],
        "prompt": "",
        "n_predict": 5,
    },
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from([[], {}, [[]], [None], {"type": "text"}, {"name": []}, "required", "<|end|>"]),
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    path: Path = tmp_path_factory.mktemp("malformed") / "model.gguf"
    write_random_llama(
        path, RandomLlama(vocab_size=320, controls=CONTROLS, width=16, layers=1, context=2048)
    )
    with Model(path) as model:
        engine: Any = ScriptedEngine(model.vocabulary, HERMES, n_ctx=2048)
        app = create_app(engine, ServeSettings(model="x"))
        with TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False) as c:
            yield c


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a value of JSON."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*path, index))
    return found


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a body in which some values are something else, or missing."""
    path = draw(st.sampled_from([*BODIES]))
    body = copy.deepcopy(BODIES[path])
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(places(body)))
        inside: Any = body
        for step in way:
            inside = inside[step]
        if draw(st.booleans()):
            inside[last] = copy.deepcopy(draw(JUNK))  # it may be changed further
        else:
            del inside[last]
        if not body:
            break
    return path, body


@pytest.mark.parametrize("path", BODIES)
def test_the_whole_bodies_are_answered(client, path):
    body = {key: value for key, value in BODIES[path].items() if key != "tool_choice"}
    if path == "/v1/messages":
        body["messages"] = [*body["messages"][:2], {"role": "user", "content": "x"}]
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(bodies())
def test_a_malformed_body_is_refused_in_a_sentence(client, asked):
    path, body = asked
    reply = client.post(path, json=body)
    payload = reply.json()
    if reply.status_code == 200:
        assert "error" not in payload or payload["error"] is None
        return
    assert reply.status_code in (400, 501), (body, reply.text)
    message = payload["error"]["message"]
    assert message
    assert "\n" not in message
    assert ("type" in payload) is (path == "/v1/messages")
