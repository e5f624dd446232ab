"""response_format, json_schema and grammar: answers follow, in every API, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.api_replies import MESSAGES, RESPONSES, body_of, said_in
from support.loopback_server import client_of, events_of
from support.tool_templates import HERMES

from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Grammar, SamplingParams
from specrun.runtime.engine import Engine

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["function", "class"]}, "is_new": {"type": "boolean"}},
    "required": ["kind", "is_new"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
ASK = [{"role": "user", "content": "what does shutil.copytree do?"}]
CHAT = {"messages": ASK, "max_tokens": 80, "seed": 3}
DIGITS = 'root ::= "n" [0-9] [0-9] [0-9]'


def chat(client: TestClient, **fields: Any) -> str:
    reply = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"]
    return text


def require_thing(text: str) -> None:
    thing = json.loads(text)
    assert list(thing) == ["kind", "is_new"]
    assert thing["kind"] in ("function", "class")
    assert thing["is_new"] in (True, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"response_format": FORMAT, "temperature": 0},
        {"response_format": FORMAT, "speculative": {"drafter": "prompt-lookup"}},
        {"response_format": FORMAT, "logprobs": True, "top_logprobs": 3},
    ],
)
def test_chats_answer_by_a_schema(client: TestClient, fields: dict[str, Any]) -> None:
    require_thing(chat(client, **fields))


def test_chats_answer_by_grammars(client: TestClient) -> None:
    for grammar in (DIGITS, "%llguidance {}\nstart: /n[0-9]{3}/"):
        text = chat(client, grammar=grammar)
        assert text[0] == "n"
        assert text[1:].isdigit()
        assert len(text) == 4
    # Text after all, beside an empty grammar, as clients send it.
    assert chat(client, response_format={"type": "text"}, grammar="", max_tokens=400)


def test_any_json_object(client: TestClient) -> None:
    reply = client.post(
        "/v1/chat/completions", json={**CHAT, "response_format": {"type": "json_object"}}
    )
    text = reply.json()["choices"][0]["message"]["content"]
    assert text.startswith("{")
    if reply.json()["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_stream_and_several_choices(client: TestClient) -> None:
    texts = ["", "", ""]
    for event in events_of(client, "/v1/chat/completions", **CHAT, response_format=FORMAT, n=3):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    for text in texts:
        require_thing(text)


def test_other_apis(client: TestClient) -> None:
    completed = client.post(
        "/v1/completions", json={"prompt": "x", "grammar": DIGITS, "max_tokens": 20}
    )
    assert completed.json()["choices"][0]["text"][1:].isdigit()
    form = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    for path, fields in (
        (RESPONSES, {"text": form, "max_output_tokens": 80}),
        (MESSAGES, {"output_config": form, "max_tokens": 80}),
    ):
        reply = client.post(path, json={**body_of(path, "what?"), **fields})
        require_thing(said_in(reply.json()).content)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "response_format is "),
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type is "),
        ({"response_format": {}}, "response_format.type", "response_format.type is "),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format has no schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format",
            "response_format: the schema must be a JSON object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "response_format: the JSON schema cannot be compiled: ",
        ),
        ({"grammar": "root ::= x"}, "grammar", "grammar: the GBNF grammar cannot be compiled: "),
        ({"grammar": "  "}, "grammar", "grammar: the GBNF grammar is empty"),
        ({"grammar": 3}, "grammar", "grammar is 3: give a text"),
        ({"json_schema": [1]}, "json_schema", "json_schema: the schema must be a JSON object"),
        (
            {"grammar": DIGITS, "response_format": FORMAT},
            "grammar",
            "response_format and grammar both bind the text",
        ),
    ],
)
def test_refusals_name_the_field(
    client: TestClient, fields: dict[str, Any], param: str, message: str
) -> None:
    reply = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(message)
    assert "\n" not in error["message"]


def test_a_strict_schema_is_followed_exactly_or_refused(client: TestClient) -> None:
    unique = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "uniqueItems": True}
    tagged = {
        **SCHEMA,
        "if": {"properties": {"kind": {"const": "class"}}},
        "then": {"properties": {"is_new": {"const": True}}},
    }

    def asked(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
        own = {"name": "thing", "schema": schema, "strict": strict}
        return {"response_format": {"type": "json_schema", "json_schema": own}}

    body = {**CHAT, **asked(unique, True), "max_tokens": 4}
    error = client.post("/v1/chat/completions", json=body)
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "response_format"
    assert "uniqueItems at # is not followed" in error.json()["error"]["message"]
    form = {"type": "json_schema", "name": "thing", "schema": unique, "strict": True}
    asked_newer = {"input": "Hi", "text": {"format": form}, "max_output_tokens": 4}
    assert client.post("/v1/responses", json=asked_newer).status_code == 400
    body = {**CHAT, **asked(unique, False), "max_tokens": 4}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    require_thing(chat(client, **asked(tagged, True)))


def test_the_servers_grammar_goes_before_none_and_behind_the_requests(demo_engine: Engine) -> None:
    params = SamplingParams(grammar=Grammar.regex("yes|no"))
    with client_of(demo_engine, model="demo", params=params) as client:
        assert chat(client) in ("yes", "no")
        assert chat(client, grammar=DIGITS).startswith("n")
        assert chat(client, response_format={"type": "text"}, max_tokens=400) not in ("yes", "no")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model whose template may open its reasoning."""
    path = tmp_path_factory.mktemp("thinker") / "thinker.gguf"
    spec = RandomLlama(
        vocab_size=320,
        controls=("<|im_start|>", "<|end|>", "</think>"),
        chat_template=HERMES,
        width=16,
        layers=1,
        context=2048,
    )
    write_random_llama(path, spec)
    with Engine(path, "none", slots=1, n_threads=1, n_ctx=2048, trust=True) as engine:
        yield engine


def test_a_grammar_begins_behind_the_reasoning(thinker: Engine) -> None:
    end = thinker.vocabulary.tokenize("</think>", add_special=False, parse_special=True)
    assert len(end) == 1
    with client_of(thinker) as client:
        bias = {str(end[0]): 3.0}
        thinking = {"chat_template_kwargs": {"open_thinking": True}, "max_tokens": 1500}
        fields = {**CHAT, **thinking, "logit_bias": bias, "response_format": FORMAT}
        reply = client.post("/v1/chat/completions", json=fields).json()
    message = reply["choices"][0]["message"]
    assert message["reasoning_content"]
    require_thing(message["content"])
