"""Calls of every family on every API, whole and streamed; marks as control tokens and as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_replies import CHAT, MESSAGES, RESPONSES, Said, body_of, said_in, said_in_stream
from support.loopback_server import client_of
from support.scripted_engine import ScriptedEngine
from support.tool_templates import ADD, WEATHER

from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.chat import Reply, ReplyPlan, ReplyReading, ThinkTags, ToolSyntax
from specrun.runtime.chat.families import FAMILIES, THINKING
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
    wanted = Said(calls=calls_of(syntax))
    engine: Any = ScriptedEngine(
        tool_vocabulary, template_of(syntax), [syntax.form.written(wanted.calls)]
    )
    ends = {
        CHAT: '"finish_reason":"tool_calls"',
        RESPONSES: '"status":"completed"',
        MESSAGES: '"stop_reason":"tool_use"',
    }
    with client_of(engine) as client:
        for path, end in ends.items():
            body = body_of(path, "Rain in Paris?", [WEATHER, ADD])
            whole = client.post(path, json=body)
            stream = client.post(path, json={**body, "stream": True})
            assert said_in(whole.json()) == said_in_stream(path, stream.content) == wanted, path
            assert end in whole.text, path
            assert end in stream.text, path


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
    reader, reply, texts = ReplyReading(plan, vocabulary).reader(), Reply(), TextAssembler(())
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    for token in tokens:
        piece = texts.push(vocabulary.piece(token))
        reply.add(reader.read([(token, piece)]))
    reply.add(reader.finish(texts.finish()))
    return reply
