"""llama-server's own paths: properties, slots, tokens, templates, metrics; and the models."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from specrun.runtime.engine import Engine


def test_health_and_models(client: TestClient) -> None:
    for path in ("/health", "/v1/health"):
        assert client.get(path).json() == {"status": "ok"}
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["demo"]
    assert client.get("/v1/models/demo").json() == listed["data"][0]


def test_properties_say_what_is_served(client: TestClient, demo_engine: Engine) -> None:
    found = client.get("/props").json()
    assert found["total_slots"] == 2
    assert found["chat_template"] == demo_engine.chat_template.source
    assert found["default_generation_settings"]["n_ctx"] == 2048
    assert found["speculative"]["drafters"] == list(demo_engine.drafters)
    assert "/" not in found["model_path"]  # where it lies is nobody else's business


def test_slots_say_what_they_do_and_nothing_of_the_texts(client: TestClient) -> None:
    body = {"prompt": "a secret text", "max_tokens": 2, "speculative.drafter": "prompt-lookup"}
    assert client.post("/v1/completions", json=body).status_code == 200
    reply = client.get("/slots")
    assert "secret" not in reply.text
    states = reply.json()
    assert [state["is_processing"] for state in states] == [False, False]
    assert "prompt-lookup" in {state["drafter"] for state in states}
    assert max(state["n_cached"] for state in states) > 2


@pytest.mark.parametrize("text", ["def foo(bar):", "", "naïve ✓", "<|user|>"])
def test_texts_become_tokens_and_texts_again(
    client: TestClient, demo_engine: Engine, text: str
) -> None:
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert tokens == demo_engine.vocabulary.tokenize(text, add_special=False, parse_special=True)
    assert client.post("/detokenize", json={"tokens": tokens}).json()["content"] == text


def test_tokens_come_with_their_pieces(client: TestClient) -> None:
    body = {"content": "def é", "with_pieces": True, "parse_special": False}
    found = client.post("/tokenize", json=body).json()["tokens"]
    pieces = [entry["piece"] for entry in found]
    # A piece that is no whole character is given as its bytes.
    assert (
        b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
        == body["content"].encode()
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**20]}, "tokens[0]"),
        ("/apply-template", {}, "messages"),
    ],
)
def test_what_cannot_be_read_is_refused(
    client: TestClient, path: str, body: dict[str, object], param: str
) -> None:
    reply = client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_templates_are_applied_as_chats_are(client: TestClient, demo_engine: Engine) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    plain = [{"role": "user", "content": "Hi"}]
    assert prompt == demo_engine.chat_template.render(plain)


def test_metrics_count_answers(client: TestClient) -> None:
    fields = {"prompt": "Recursively copy", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    for _ in range(3):
        client.post("/v1/completions", json=fields)
    client.post("/v1/completions", json={"prompt": 5})
    client.get("/v1/nothing")
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    rows = dict(line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#"))
    assert float(rows['specrun_tokens_total{kind="generated",model="demo"}']) == 15
    assert float(rows['specrun_answers_total{finish_reason="length",model="demo"}']) == 3
    assert float(rows['specrun_requests_total{path="/v1/completions",status="200"}']) == 3
    assert float(rows['specrun_requests_total{path="/v1/completions",status="400"}']) == 1
    assert float(rows['specrun_requests_total{path="other",status="404"}']) == 1
    assert float(rows['specrun_slots{model="demo"}']) == 2
    assert float(rows['specrun_rounds_total{model="demo"}']) > 0


def test_texts_and_tokens_in_the_form_of_vllm(client: TestClient, demo_engine: Engine) -> None:
    text = "<|user|>naïve ✓"
    own = client.post("/tokenize", json={"content": text}).json()["tokens"]
    body = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    found = client.post("/tokenize", json=body).json()
    assert (found["tokens"], found["count"], found["max_model_len"]) == (own, len(own), 2048)
    assert found["token_strs"][0] == "<|user|>"
    assert len(found["token_strs"]) == len(own)
    reply = client.post("/detokenize", json={"tokens": own}).json()
    assert reply["prompt"] == reply["content"] == text
    known = client.get("/tokenizer_info").json()
    assert known["eos_token"] == "<|end|>"
    assert known["chat_template"] == demo_engine.chat_template.source
