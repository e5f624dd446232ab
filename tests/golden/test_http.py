"""Transcripts of the server: the embedded family, every API, good bodies and wrong ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from golden.record import check
from specrun.cli.serve.app import create_app
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.engine import Engine

ASK = [{"role": "user", "content": "What does os.getcwd do?"}]
GREEDY = {"temperature": 0, "seed": 1}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("POST", "/v1/chat/completions", {"messages": ASK, "max_tokens": 12, **GREEDY}),
    ("POST", "/v1/chat/completions", {"messages": ASK, "max_tokens": 8, "stream": True, **GREEDY}),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": 6, "logprobs": True, **GREEDY},
    ),
    ("POST", "/v1/chat/completions", {"messages": ASK, "tools": [TOOL], "max_tokens": 8, **GREEDY}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/chat/completions", {"messages": ASK, "temperature": "hot"}),
    ("POST", "/v1/chat/completions", {"messages": ASK, "max_tokens": "many"}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("POST", "/v1/completions", {"prompt": "os.getcwd", "max_tokens": 8, **GREEDY}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, **GREEDY}),
    ("POST", "/v1/completions", {"prompt": 7}),
    (
        "POST",
        "/v1/responses",
        {"input": "What does os.getcwd do?", "max_output_tokens": 12, "temperature": 0},
    ),
    ("POST", "/v1/responses", {"input": 3}),
    (
        "POST",
        "/v1/messages",
        {"model": "tiny", "messages": ASK, "max_tokens": 12, "temperature": 0},
    ),
    ("POST", "/v1/messages", {"model": "tiny", "messages": ASK}),
    ("POST", "/completion", {"prompt": "os.getcwd", "n_predict": 8, **GREEDY}),
    ("POST", "/tokenize", {"content": "os.getcwd"}),
    ("POST", "/detokenize", {"tokens": [1, 273, 276]}),
    ("POST", "/apply-template", {"messages": ASK}),
    ("POST", "/v1/nothing", {}),
    ("GET", "/v1/chat/completions", None),
]
# Ids, times and speeds differ from run to run.
_NAMES = (
    r"id|logprob|created|created_at|completed_at|item_id|response_id|system_fingerprint|timings|trace|root"
    r"|cached_tokens|cache_read_input_tokens|input_tokens|request_id|\w*_(ms|second|s|seconds)"
)
VOLATILE = re.compile(rf'"({_NAMES})": ?("[^"]*"|[-\d.e]+|\{{[^{{}}]*\}})')


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with Engine.demo("draft(n=3)", slots=2, n_ctx=1024, n_threads=1) as engine:
        with TestClient(
            create_app(engine, ServeSettings(model="tiny")), "http://127.0.0.1"
        ) as client:
            yield client


def joined(text: str) -> str:
    """A stream's pieces of content as one: how they are cut depends on time."""
    pieces = re.findall(r'"delta":\{"content":"(.*?)"\}', text)
    lines = [line for line in text.splitlines() if '"delta":{"content":' not in line and line]
    return "\n".join([*lines, *(["".join(pieces)] if pieces else [])])


def test_transcripts(client: TestClient) -> None:
    found = {}
    for number, (method, path, body) in enumerate(REQUESTS):
        answer = client.request(method, path, json=body)
        text = VOLATILE.sub(r'"\1": "*"', joined(answer.text))
        name = f"{number:02} {method} {path} {json.dumps(body)}"
        found[name] = {"status": answer.status_code, "body": text.splitlines()}
    check("http", found)
