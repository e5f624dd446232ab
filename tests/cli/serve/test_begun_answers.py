"""Answers that were begun go on, in every API; the prompt never ends within a thought."""

from __future__ import annotations

from typing import Any

import pytest
from support.loopback_server import posted
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.bindings.models.vocabulary import Vocabulary

ASK: list[Any] = [{"role": "user", "content": "Rain in Paris?"}]


def written(vocabulary: Vocabulary, tokens: list[int]) -> str:
    """The text of tokens, control tokens by their names."""
    return "".join(vocabulary.piece(each).decode() or vocabulary.label(each) for each in tokens)


def completed(engine: Any, messages: list[Any], **body: Any) -> Any:
    reply = posted(engine, "/v1/chat/completions", messages=messages, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


BEGUN: list[Any] = [*ASK, {"role": "assistant", "content": "It is ("}]


@pytest.mark.parametrize(
    ("fields", "is_begun"),
    [
        ({}, True),  # as in llama-server
        ({"continue_final_message": True}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"continue_final_message": "content"}, True),
        ({"add_generation_prompt": False}, True),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
    ],
)
def test_an_answer_that_was_begun_goes_on(tool_vocabulary, fields, is_begun):
    engine = ScriptedEngine(tool_vocabulary, HERMES, ["B)."])
    answer = completed(engine, BEGUN, **fields)
    rendered = posted(engine, "/apply-template", messages=BEGUN, **fields)
    assert answer["content"] == "B)."
    prompt = written(tool_vocabulary, engine.asked[0].prompt)
    assert prompt == rendered.json()["prompt"]
    ends = ("assistant\nIt is (", "It is (<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.endswith(ends[0] if is_begun else ends[1])


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ({"content": "", "reasoning_content": "Hm. So"}, "assistant\n<think>\nHm. So"),
        (
            {"content": "It", "reasoning_content": "Hm."},
            "assistant\n<think>\nHm.\n</think>\n\nIt",
        ),
    ],
)
def test_a_thought_that_was_begun_goes_on(tool_vocabulary, said, end):
    engine = ScriptedEngine(tool_vocabulary, HERMES, [" on.</think>Dry."])
    talk = [*ASK, {"role": "assistant", **said}]
    answer = completed(engine, talk)
    assert written(tool_vocabulary, engine.asked[0].prompt).endswith(end)
    if not said["content"]:  # nothing else opens the reasoning
        assert (answer["reasoning_content"], answer["content"]) == ("on.", "Dry.")


def test_no_answer_and_no_question_ends_a_prompt(tool_vocabulary):
    engine = ScriptedEngine(tool_vocabulary, HERMES)
    completed(engine, ASK, add_generation_prompt=False)
    completed(engine, ASK, continue_final_message=True)
    asked = [written(tool_vocabulary, each.prompt) for each in engine.asked]
    assert asked[0].endswith(f"{ASK[0]['content']}<|im_end|>\n")
    assert asked[1].endswith(ASK[0]["content"])


@pytest.mark.parametrize(
    ("talk", "fields"),
    [
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": True}),
        (BEGUN, {"continue_final_message": "thoughts"}),
        (
            [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}],
            {"continue_final_message": True},
        ),
    ],
)
def test_what_cannot_go_on_is_refused(silent, talk, fields):
    engine, _ = silent
    reply = posted(engine, "/v1/chat/completions", messages=talk, **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "continue_final_message"
    assert engine.asked == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": BEGUN, "max_tokens": 9}),
        ("/v1/responses", {"input": BEGUN}),
        ("/v1/chat/completions", {"messages": BEGUN}),
    ],
)
def test_every_api_closes_a_thought_that_the_template_opens(tool_vocabulary, path, body):
    opens = HERMES + "<think>\n"
    engine = ScriptedEngine(tool_vocabulary, opens, ["B)."])
    reply = posted(engine, path, **body)
    assert "B)." in reply.text
    assert "reasoning_content" not in reply.text
    prompt = written(tool_vocabulary, engine.asked[0].prompt)
    assert prompt.endswith("assistant\nIt is (")
