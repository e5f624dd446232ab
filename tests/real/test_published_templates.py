"""Published chat templates, in the folder that SPECRUN_TEMPLATES names: as transformers has them.

llama.cpp keeps such a folder (models/templates).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.replies import chat_text

from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.chat import ChatTemplate
from specrun.runtime.demo import demo_target

pytestmark = pytest.mark.real
FOLDER = Path(os.environ.get("SPECRUN_TEMPLATES", "no folder"))
FILES = sorted(FOLDER.glob("*.jinja"))
CITY = {"type": "string", "description": "A city."}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Xqparis"}},
}
RESULT = {
    "role": "tool",
    "tool_call_id": "abcdefghi",
    "name": "get_weather",
    "content": "Xqresult",
}


def said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


SYSTEM, USER, ANSWER, AND = (
    ("system", "Xqsys."),
    ("user", "Xqone?"),
    ("assistant", "Xqans."),
    ("user", "Xqtwo?"),
)
LATE = ("system", "Xqlate.")
TALKS = {
    "a question": said(USER),
    "a talk": said(SYSTEM, USER, ANSWER, AND),
    "two systems": said(SYSTEM, ("developer", "Xqdev."), USER),
    "a late system": said(SYSTEM, USER, ANSWER, LATE, AND),
    "a system at the end": said(SYSTEM, USER, ANSWER, AND, LATE),
    "a system alone": said(SYSTEM),
    "users": said(USER, AND),
    "answers": said(USER, ANSWER, ("assistant", "Xqmore."), AND),
    "an answer first": said(ANSWER, AND),
    "an answer behind the system": said(SYSTEM, ANSWER, AND),
    "calls": [
        *said(SYSTEM, USER),
        {"role": "assistant", "content": "Xqlook", "tool_calls": [CALL]},
        RESULT,
        *said(LATE, AND),
    ],
}


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    with Model(demo_target(), vocab_only=True) as model:
        yield model.vocabulary


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def template(request: pytest.FixtureRequest) -> tuple[str, ChatTemplate]:
    path: Path = request.param
    return path.stem, ChatTemplate(path.read_text("utf-8"), bos="<s>", eos="</s>")


def test_there_are_some():
    if not FOLDER.is_dir():
        pytest.skip("needs published templates: set SPECRUN_TEMPLATES to their folder")
    assert FILES


def test_they_render_as_in_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    _, own = template
    for talk in TALKS.values():
        for tools in ([], [TOOL]):
            try:
                theirs = render_jinja_template(
                    [talk],
                    tools=tools or None,
                    chat_template=own.source,
                    add_generation_prompt=True,
                    bos_token="<s>",
                    eos_token="</s>",
                )
            except Exception:  # what it refuses may be rendered here
                continue
            (text,) = theirs[0] if isinstance(theirs, tuple) else theirs
            assert own.render(talk, tools=tools) == text


@pytest.mark.parametrize("name", TALKS)
def test_no_text_is_lost_or_said_twice(template, vocabulary, name):
    _, own = template
    talk = TALKS[name]
    text = chat_text(own, vocabulary, talk, tools=[TOOL] if name == "calls" else []).text
    wanted = re.findall(r"Xq\w+", str(talk))
    found = {word: text.count(word) for word in wanted if text.count(word) != 1}
    assert found == {}


def test_answers_go_on(template, vocabulary):
    _, own = template
    talk = said(USER, ANSWER, AND, ("assistant", "Xqbegun is "))
    text = chat_text(own, vocabulary, talk, is_begun=True)
    assert text.text.endswith("Xqbegun is ")
    assert text.text.count("Xqbegun") == 1
