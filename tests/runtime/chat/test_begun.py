"""Answers that were begun go on: the prompt ends behind their text, and never within a thought."""

from __future__ import annotations

from typing import Any

import pytest
from support.replies import chat_text

from specrun.runtime.chat import ChatTemplate, is_begun_answer
from specrun.runtime.engine import Engine, Runtime

_USERS = "{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}</s>"
_PROMPT = "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>"
PLAIN = _USERS + "{% else %}<assistant>{{ m.content | trim }}</s>" + _PROMPT + "{% endif %}"
THINKS = (
    _USERS + "{% else %}<assistant><think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    "{{ m.content }}</s>" + _PROMPT + "<think>\n{% endif %}"
)
FORGETS = _USERS + "{% else %}<assistant>{{ m.content }}</s>" + _PROMPT + "<think>\n{% endif %}"
DROPS = _USERS + "{% else %}" + _PROMPT + "<think>\n{% endif %}"
SWITCHED = (
    _USERS + "{% else %}<assistant>{{ m.content }}</s>" + _PROMPT + "<think>\n</think>\n{% endif %}"
)
CHANNELS = (
    _USERS + "{% else %}<assistant>{% if m.thinking %}<|analysis|>{{ m.thinking }}<|end|>"
    "{% endif %}<|final|>{{ m.content }}</s>" + _PROMPT + "{% endif %}"
)
RAISES = (
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the user is last') }}{% endif %}"
    + PLAIN
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}</s>{% endfor %}"
)
THOUGHT = "<think>\nHm.\n</think>\n\n"
CASES = {
    "plain": (PLAIN, "It is ", "", "<assistant>", "It is "),
    "outside the thoughts": (THINKS, "It is ", "", "<assistant><think>\n\n</think>\n\n", "It is "),
    "behind a thought": (THINKS, "It is ", "Hm.", "<assistant>" + THOUGHT, "It is "),
    "within a thought": (THINKS, "", "Hm. So", "<assistant><think>\n", "Hm. So"),
    "no thought in the history": (FORGETS, "It is ", "", "<assistant>", "It is "),
    "a thought of the prompt's": (FORGETS, "It is ", "Hm.", "<assistant>" + THOUGHT, "It is "),
    "it goes on there": (FORGETS, "", "Hm. So", "<assistant><think>\n", "Hm. So"),
    "no answers in the history": (
        DROPS,
        "It is",
        "",
        "<assistant>" + "<think>\n\n</think>\n\n",
        "It is",
    ),
    "a thought where none is asked for": (SWITCHED, "It", "Hm.", "<assistant>" + THOUGHT, "It"),
    "in a channel": (CHANNELS, "It is ", "Hm.", "<|analysis|>Hm.<|end|><|final|>", "It is "),
    "within a channel": (CHANNELS, "", "Hm.", "<|analysis|>", "Hm."),
    "where the user is last": (RAISES, "It is ", "", "<assistant>", "It is "),
    "in parts": (PARTS, "It is ", "", "<assistant>", "It is "),
    "with a control token's text": (PLAIN, "So <|end|>", "", "<assistant>", "So <|end|>"),
    "that the template has, too": (PLAIN, "s>", "", "<assistant>", "s>"),
}


def begun(content: str, thought: str = "") -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        answer["reasoning_content"] = thought
    return [{"role": "user", "content": "Rain?"}, answer]


@pytest.mark.parametrize(
    ("source", "content", "thought", "before", "end"), CASES.values(), ids=CASES
)
def test_an_answer_goes_on(vocabulary, source, content, thought, before, end):
    talk = begun(content, thought)
    text = chat_text(ChatTemplate(source), vocabulary, talk, is_begun=True)
    assert text.text.startswith("<user>Rain?</s>")
    assert text.text.endswith(before + end)
    assert text.text.count(content or thought) <= 1 + source.count("s>")
    assert text.end
    assert before.endswith(text.end) or text.end.endswith(before)
    controls = [t for t in text.tokens(vocabulary) if vocabulary.label(t) == "<|end|>"]
    assert len(controls) == before.count("<|end|>")


def test_an_answer_without_a_text_is_not_begun(vocabulary):
    template = ChatTemplate(THINKS)
    for content in ("", " \n"):
        text = chat_text(template, vocabulary, begun(content), is_begun=True).text
        assert text == "<user>Rain?</s><assistant><think>\n"


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"role": "assistant", "content": "It is"}, True),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, False),
        ({"role": "user", "content": "It is"}, False),
        ({"role": "tool", "content": "It is"}, False),
    ],
)
def test_which_conversations_go_on(last, expected):
    assert is_begun_answer([{"role": "user", "content": "Rain?"}, last]) is expected


def test_answers_go_on_from_python():
    talk = begun("It")
    with Runtime.demo("none", n_ctx=256, n_threads=1, trust=True) as runtime:
        prompt = runtime.vocabulary.detokenize(runtime.chat_prompt(talk))
        asked = runtime.vocabulary.detokenize(runtime.chat_prompt(talk[:1]))
        assert prompt == asked + "It"
    with Engine.demo("none", n_ctx=256, n_threads=1, trust=True) as engine:
        answer = engine.submit_chat(talk, max_tokens=1).result
        assert answer.usage.prompt_tokens == len(engine.chat_prompt(talk))
