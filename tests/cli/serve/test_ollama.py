"""Ollama's API: the same answers as OpenAI's, in lines of JSON, and what clients look up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.loopback_server import client_of
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES, WEATHER

from specrun.bindings.models.vocabulary import Vocabulary

ASK = [{"role": "user", "content": "What does os.getcwd do?"}]
COLD = {"temperature": 0}


def lines(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def openai_text(client: TestClient, **body: Any) -> str:
    reply = client.post("/v1/chat/completions", json={"messages": ASK, "temperature": 0, **body})
    return str(reply.json()["choices"][0]["message"]["content"])


def test_an_answer_is_openais_whole_and_in_lines(client: TestClient) -> None:
    wanted = openai_text(client)
    body = {"model": "demo", "messages": ASK, "options": COLD}
    streamed = lines(client, "/api/chat", body)
    assert "".join(each["message"]["content"] for each in streamed) == wanted
    assert [each["done"] for each in streamed] == [False] * (len(streamed) - 1) + [True]
    whole = client.post("/api/chat", json={**body, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": wanted}
    for end in (streamed[-1], whole):
        assert (end["done"], end["done_reason"], end["model"]) == (True, "stop", "demo")
        assert end["total_duration"] == end["prompt_eval_duration"] + end["eval_duration"]
        assert end["eval_count"] == whole["eval_count"] > 1
        assert end["prompt_eval_count"] > 1


def test_a_prompt_is_a_users_message_and_a_raw_one_a_text(client: TestClient) -> None:
    body = {"prompt": ASK[0]["content"], "options": COLD, "stream": False}
    assert client.post("/api/generate", json=body).json()["response"] == openai_text(client)
    streamed = lines(client, "/api/generate", {**body, "stream": True})
    assert "".join(each["response"] for each in streamed) == openai_text(client)
    raw = {"prompt": "Return the", "raw": True, "options": {**COLD, "num_predict": 5}}
    plain = {"prompt": "Return the", "temperature": 0, "max_tokens": 5}
    text = client.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    found = client.post("/api/generate", json={**raw, "stream": False}).json()
    assert (found["response"], found["done_reason"]) == (text, "length")


def test_options_and_formats_have_the_meaning_of_openais_fields(client: TestClient) -> None:
    options = {**COLD, "num_predict": 3, "num_ctx": 99_999, "num_gpu": 1, "no_such_option": 1}
    body = {"messages": ASK, "stream": False}
    short = client.post("/api/chat", json={**body, "options": options}).json()
    assert short["message"]["content"] == openai_text(client, max_tokens=3)
    warm = {"temperature": 1.5, "seed": 4, "top_k": 20, "stop": ["."], "repeat_penalty": 1.2}
    drawn = client.post("/api/chat", json={**body, "options": warm}).json()
    assert drawn["message"]["content"] == openai_text(client, **warm)
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    bound = client.post("/api/chat", json={**body, "options": COLD, "format": schema}).json()
    assert json.loads(bound["message"]["content"])["a"] in (1, 2)


@pytest.mark.parametrize(("path", "empty"), [("chat", {"messages": []}), ("generate", {})])
def test_without_a_text_the_model_is_loaded(client: TestClient, path: str, empty: Any) -> None:
    reply = client.post(f"/api/{path}", json={"model": "demo", **empty}).json()
    assert (reply["done"], reply["done_reason"]) == (True, "load")


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("chat", {"messages": ASK, "options": {"temperature": "hot"}}, 400, "temperature is 'hot'"),
        ("chat", {"messages": ASK, "format": "xml"}, 400, "format is 'xml': give json"),
        ("chat", {"messages": ASK, "think": "a lot"}, 400, "think is 'a lot': give true, false"),
        ("chat", {"messages": [{**ASK[0], "images": ["aGk="]}]}, 400, "messages[0].content[1]"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "context is not kept here"),
        ("generate", {"prompt": "a", "template": "{{"}, 400, "template is not read here"),
        ("generate", {"prompt": "a", "suffix": "b"}, 501, "suffix: this model's vocabulary"),
        ("show", {"model": "other"}, 404, "model 'other' not found: this server has 'demo'"),
        ("pull", {"model": "other"}, 404, "there is no /api/pull here"),
    ],
)
def test_errors_are_sentences(
    client: TestClient, path: str, body: Any, status: int, sentence: str
) -> None:
    reply = client.post(f"/api/{path}", json=body)
    assert (reply.status_code, [*reply.json()]) == (status, ["error"])
    assert reply.json()["error"].startswith(sentence)


def test_models_are_described(client: TestClient) -> None:
    (listed,) = client.get("/api/tags").json()["models"]
    (loaded,) = client.get("/api/ps").json()["models"]
    assert listed.items() <= loaded.items()
    details = {"family": "llama", "parameter_size": "7.34M", "quantization_level": "Q8_0"}
    assert (listed["name"], listed["size"]) == ("demo", 7_944_672)
    assert details.items() <= listed["details"].items()
    shown = client.post("/api/show", json={"model": "demo:latest"}).json()
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] > 0
    assert shown["model_info"]["tokenizer.ggml.tokens"] is None
    assert shown["capabilities"] == ["completion"]
    assert client.get("/api/version").json()["version"]


def test_calls_and_their_results_go_through_the_template(tool_vocabulary: Vocabulary) -> None:
    text = 'So: <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    engine: Any = ScriptedEngine(tool_vocabulary, HERMES, [text, text, "It rains."])
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    with client_of(engine) as client:
        body = {"messages": ASK, "tools": [WEATHER]}
        whole = client.post("/api/chat", json={**body, "stream": False}).json()["message"]
        streamed = lines(client, "/api/chat", body)
        with_calls = [each["message"] for each in streamed if "tool_calls" in each["message"]]
        for message in (whole, *with_calls):
            (made,) = message["tool_calls"]
            assert made["function"] == {"index": 0, **call["function"]}
        assert len(with_calls) == 1
        assert "".join(each["message"]["content"] for each in streamed) == whole["content"]
        answer = {"role": "tool", "tool_name": "get_weather", "content": "rain"}
        history = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]
        client.post("/api/chat", json={"messages": history, "tools": [WEATHER], "stream": False})
    prompt = tool_vocabulary.detokenize(engine.asked[-1].prompt)
    assert '"city": "Rome"' in prompt
    assert "rain" in prompt.rpartition("get_weather")[2]


def test_thoughts_are_a_field_of_their_own(tool_vocabulary: Vocabulary) -> None:
    template = HERMES + "{# <think> </think> #}"
    engine: Any = ScriptedEngine(tool_vocabulary, template, ["<think>Hm.</think>Four."])
    with client_of(engine) as client:
        body = {"messages": ASK, "think": True}
        whole = client.post("/api/chat", json={**body, "stream": False}).json()["message"]
        streamed = [each["message"] for each in lines(client, "/api/chat", body)]
    assert whole == {"role": "assistant", "content": "Four.", "thinking": "Hm."}
    assert "".join(each.get("thinking", "") for each in streamed) == "Hm."
    assert "".join(each["content"] for each in streamed) == "Four."
