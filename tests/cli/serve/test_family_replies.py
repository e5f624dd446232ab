"""Calls of every family on every API, whole and streamed; marks as control tokens and as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.loopback_server import client_of, objects_of
from support.scripted_engine import ScriptedEngine
from support.tool_templates import ADD, WEATHER

from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.chat import Reply, ReplyPlan, ThinkTags, ToolSyntax
from specrun.runtime.chat.families import FAMILIES, THINKING
from specrun.runtime.round import TokenEvent
from specrun.runtime.round.text import TextAssembler

PARIS = ("get_weather", {"city": "Paris"})
NOTE = ("add", {"a": -3, "note": "x <b> 'y'\n"})
IDS = [f"{k} {syntax.name}" for k, syntax in enumerate(FAMILIES)]
BODY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
ASK = [{"role": "user", "content": "Rain in Paris?"}]


def template_of(syntax: ToolSyntax) -> str:
    """A template that is known as the family's."""
    return f"{{# {' '.join(syntax.known_by[0])} #}}{BODY}"


def calls_of(syntax: ToolSyntax) -> list[tuple[str, dict[str, Any]]]:
    return [PARIS, NOTE] if syntax.form.separator is not None else [NOTE]


@pytest.fixture(scope="module")
def marked_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    """A vocabulary in which the marks of all families are control tokens."""
    marks = {mark for syntax in FAMILIES for mark in syntax.marks}
    marks |= {mark for _, tags in THINKING for mark in (tags.first, tags.last, *tags.around)}
    controls = sorted(mark for mark in marks if re.fullmatch(r"[<\[]\S+[>\]]", mark))
    controls = [mark for mark in controls if not re.search(r">.*<", mark)]
    path: Path = tmp_path_factory.mktemp("marks") / "marks.gguf"
    size = 300 + len(controls)
    spec = RandomLlama(vocab_size=size, controls=("<|im_end|>", *controls), width=16, layers=1)
    write_random_llama(path, spec)
    with Model(path) as model:
        yield model.vocabulary


@pytest.mark.parametrize("syntax", FAMILIES, ids=IDS)
def test_calls_of_each_family_on_every_api(tool_vocabulary, syntax: ToolSyntax):
    engine: Any = ScriptedEngine(
        tool_vocabulary, template_of(syntax), [syntax.form.written(calls_of(syntax))]
    )
    with client_of(engine) as client:
        for read in (chat, chat_stream, responses, responses_stream, messages, messages_stream):
            assert read(client) == calls_of(syntax), read.__name__


def chat(client: TestClient) -> list[tuple[str, Any]]:
    reply = client.post("/v1/chat/completions", json={"messages": ASK, "tools": [WEATHER, ADD]})
    (choice,) = reply.json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    made = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in made]


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return objects_of(client.post(path, json={**body, "stream": True}).text)


def chat_stream(client: TestClient) -> list[tuple[str, Any]]:
    made: list[tuple[str, str]] = []
    body = {"messages": ASK, "tools": [WEATHER, ADD]}
    for event in events(client, "/v1/chat/completions", body):
        delta = event["choices"][0]["delta"]
        assert not delta.get("content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                made.append((call["function"]["name"], ""))
            name, arguments = made[call["index"]]
            made[call["index"]] = (name, arguments + call["function"]["arguments"])
    return [(name, json.loads(arguments)) for name, arguments in made]


def tools_of_responses() -> list[dict[str, Any]]:
    return [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]


def responses(client: TestClient) -> list[tuple[str, Any]]:
    body = {"input": "Rain?", "tools": tools_of_responses()}
    output = client.post("/v1/responses", json=body).json()["output"]
    assert {item["type"] for item in output} == {"function_call"}
    return [(item["name"], json.loads(item["arguments"])) for item in output]


def responses_stream(client: TestClient) -> list[tuple[str, Any]]:
    body = {"input": "Rain?", "tools": tools_of_responses()}
    done = "response.function_call_arguments.done"
    found = [each for each in events(client, "/v1/responses", body) if each["type"] == done]
    return [(each["name"], json.loads(each["arguments"])) for each in found]


def tools_of_messages() -> list[dict[str, Any]]:
    functions = [tool["function"] for tool in (WEATHER, ADD)]
    return [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]


def messages(client: TestClient) -> list[tuple[str, Any]]:
    body = {"messages": ASK, "max_tokens": 999, "tools": tools_of_messages()}
    reply = client.post("/v1/messages", json=body).json()
    assert reply["stop_reason"] == "tool_use"
    assert {block["type"] for block in reply["content"]} == {"tool_use"}
    return [(block["name"], block["input"]) for block in reply["content"]]


def messages_stream(client: TestClient) -> list[tuple[str, Any]]:
    body = {"messages": ASK, "max_tokens": 999, "tools": tools_of_messages()}
    made: list[tuple[str, str]] = []
    for event in events(client, "/v1/messages", body):
        if event["type"] == "content_block_start":
            made.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta":
            name, arguments = made[-1]
            made[-1] = (name, arguments + event["delta"]["partial_json"])
    return [(name, json.loads(arguments)) for name, arguments in made]


@pytest.mark.parametrize("syntax", FAMILIES, ids=IDS)
def test_marks_that_are_control_tokens(marked_vocabulary, syntax: ToolSyntax):
    """They have no text of their own: the reader puts their names in."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, ADD)}
    plan = ReplyPlan(syntax=syntax, schemas=schemas)
    reply = read(marked_vocabulary, plan, syntax.form.written(calls_of(syntax)))
    assert reply.content == ""
    made = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    assert made == calls_of(syntax)


@pytest.mark.parametrize("think", [tags for _, tags in THINKING], ids=lambda tags: tags.first)
def test_reasoning_between_control_tokens(marked_vocabulary, think: ThinkTags):
    if think.follow == "<|start|>assistant":
        return  # messages: in the tests of families
    answer = f"{think.follow}{think.around[0]}Yes." if think.around else "Yes."
    text = f"{think.first}\nHm.\n{think.last}{answer}"
    reply = read(marked_vocabulary, ReplyPlan(think=think), text)
    assert (reply.reasoning.strip(), reply.content) == ("Hm.", "Yes.")


def read(vocabulary: Vocabulary, plan: ReplyPlan, text: str) -> Reply:
    reader, reply, texts = plan.reader(vocabulary, ""), Reply(), TextAssembler(())
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    for k, token in enumerate(tokens):
        piece = texts.push(vocabulary.piece(token))
        reply.add(reader.read([TokenEvent(piece, token, "target", k, None)]))
    reply.add(reader.finish(texts.finish()))
    return reply
