"""Python's toolkits for agents, each as its documentation shows it: programs/*.py.

Each calls tools over several turns and then wants an object with fields; the programs print what
they got.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.client_desk import PYTHON, Desk, call, program

pytestmark = pytest.mark.clients
PROGRAMS = Path(__file__).parent / "programs"
WEATHER = call("get_weather", city="Paris")
FIRST, SECOND = '{"city": "Paris", "degrees": 8}', '{"city": "Lutetia", "degrees": 9}'
OBJECTS = [json.loads(FIRST), json.loads(SECOND)]


def printed(desk: Desk, name: str, way: str, *turns: str) -> list[str]:
    """Run a program against a model that says `turns`; return its lines."""
    python = program(*PYTHON)
    with desk.scripted(*turns) as server:
        said = desk.run(python, PROGRAMS / f"{name}.py", server.address, way)
    assert server.failed == []
    return [line for line in said.splitlines() if line and "Provider List" not in line]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_calls_tools_and_answers_by_a_type(desk: Desk, api: str) -> None:
    turns = WEATHER, call("add", a=7, b=1), FIRST, SECOND
    assert list(map(json.loads, printed(desk, "agents_sdk", api, *turns))) == OBJECTS
    path = "/v1/chat/completions" if api == "chat" else "/v1/responses"
    bodies = desk.server.sent(path)
    assert len(bodies) == 4
    assert all(body["tools"] and ("response_format" in body or "text" in body) for body in bodies)


@pytest.mark.parametrize("way", ["native", "tool"])
def test_pydantic_ai_answers_by_a_type(desk: Desk, way: str) -> None:
    """The object comes by a format beside the tools, or as the call of one more tool."""
    last = [FIRST, SECOND] if way == "native" else [call("final_result", **o) for o in OBJECTS]
    lines = printed(desk, "pydantic_agent", way, WEATHER, *last)
    assert list(map(json.loads, lines)) == OBJECTS
    assert len(desk.server.sent("/v1/chat/completions")) == 3


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain_binds_tools_streams_and_answers_by_a_type(desk: Desk, api: str) -> None:
    turns = "I look.\n" + WEATHER, "The sky is clear.", '{"city": "Paris", "sky": "clear"}'
    call_, text, answer = printed(desk, "langchain_agent", api, *turns)
    assert call_ == "get_weather {'city': 'Paris'}"
    assert text == "The sky is clear."
    assert json.loads(answer) == {"city": "Paris", "sky": "clear"}


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_calls_tools_by_two_apis(desk: Desk, provider: str) -> None:
    turns = "I look.\n" + WEATHER, "The sky is clear."
    lines = printed(desk, "litellm_calls", provider, *turns)
    assert lines == ["get_weather {'city': 'Paris'}", "The sky is clear."]
    path = "/v1/chat/completions" if provider == "openai" else "/v1/messages"
    assert len(desk.server.sent(path)) == 2


def llm_settings(desk: Desk) -> dict[str, str]:
    """Connect `llm` to the server; return the environment that it needs."""
    settings = desk.home / "llm"
    settings.mkdir()
    (settings / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: local\n  api_base: {desk.server.address}/v1\n"
        "  supports_tools: true\n"
    )
    return {"LLM_USER_PATH": str(settings)}


def test_llm_calls_a_function_and_goes_on(desk: Desk) -> None:
    llm = program("python", "bin", "llm")
    function = "def get_weather(city: str) -> str:\n    return city + ': clear'\n"
    options = "-m", "local", "--key", "none"
    with desk.scripted("I look.\n" + WEATHER, "The sky is clear.", "Yes, all day.") as server:
        settings = llm_settings(desk)
        question = "How is the sky of Paris?"
        first = desk.run(llm, *options, "--functions", function, question, **settings)
        second = desk.run(llm, "-c", *options, "All day?", **settings)
    assert first.endswith("The sky is clear.\n")
    assert second == "Yes, all day.\n"
    assert server.failed == []


def test_llm_talks_to_a_published_model(desk: Desk, published: Path) -> None:
    llm = program("python", "bin", "llm")
    options = "-m", "local", "--key", "none", "-o", "temperature", "0", "-o", "max_tokens", "40"
    with desk.served(published, "-c", 2048) as server:
        settings = llm_settings(desk)
        first = desk.run(llm, *options, "What is the capital of France?", **settings)
        desk.run(llm, "-c", *options, "And of Italy?", **settings)
    asked, answered, _ = server.sent("/v1/chat/completions")[1]["messages"]
    assert asked["content"] == "What is the capital of France?"
    assert answered["content"].strip() == first.strip() != ""
    assert server.failed == []
