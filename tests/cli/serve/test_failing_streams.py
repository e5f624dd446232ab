"""Streams that fail in the middle: each API says so in its own events, and ends."""

from __future__ import annotations

import json
from typing import Any

from support.loopback_server import client_of
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.bindings.errors import DecodeFailedError
from specrun.bindings.models.vocabulary import Vocabulary

WHY = "the backend failed to evaluate 3 tokens"


def events(vocabulary: Vocabulary, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names and objects of a stream's events."""
    engine: Any = ScriptedEngine(vocabulary, HERMES, ["one two"], fails=DecodeFailedError(WHY, -3))
    with client_of(engine) as client:
        text = client.post(path, json={**body, "stream": True}).text
    found: list[tuple[str, Any]] = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


def test_a_chat_ends_with_an_error_object(tool_vocabulary):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    said = events(tool_vocabulary, "/v1/chat/completions", body)
    assert said[-1][1]["error"]["message"] == WHY
    assert said[-1][1]["error"]["type"] == "server_error"


def test_a_message_ends_with_an_error_event(tool_vocabulary):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    said = events(tool_vocabulary, "/v1/messages", body)
    assert [name for name, _ in said] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]
    error = {"type": "api_error", "message": WHY}
    assert said[-1][1] == {"type": "error", "error": error}


def test_a_response_fails(tool_vocabulary):
    said = events(tool_vocabulary, "/v1/responses", {"input": "hi"})
    name, last = said[-1]
    assert name == last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": WHY}
    assert last["sequence_number"] == len(said) - 1
