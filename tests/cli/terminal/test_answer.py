"""Answers that are stopped or fail: what is shown, and what stays of the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrun.bindings.models import Model
from specrun.cli.chat import loop as chat_loop
from specrun.cli.terminal import terminal
from specrun.cli.terminal.answer import (
    Answer,
    AnswerWriter,
    PlainWriter,
    ReplyWriter,
    run_stream,
)
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime import DecodeError, GenerationStream
from specrun.runtime.chat import answer_reader
from specrun.runtime.round import TokenEvent

from ..conftest import READABLE, Models, Run


class StoppedStream:
    """A stream whose second token was decided, but not yet handed over, when Ctrl-C came."""

    def __init__(self, text: str) -> None:
        self.closed = False
        self._text = text

    def hand_to(self, consume: Callable[[Any], None]) -> None:
        consume(type("Event", (), {"text": self._text[:3], "origin": "target"})())
        raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True

    @property
    def result(self) -> Any:
        return type("Result", (), {"text": self._text})()


@pytest.mark.parametrize(
    ("text", "shown"),
    [("one two", "one two\n"), ("one", "one\n"), ("on\n", "on\n"), ("one\n", "one\n")],
)
def test_a_stopped_answer_is_shown_to_its_last_letter(
    capsys: pytest.CaptureFixture[str], text: str, shown: str
) -> None:
    stream: Any = StoppedStream(text)
    answer = run_stream(stream, PlainWriter(Terminal()))
    assert capsys.readouterr().out == shown
    assert answer.interrupted
    assert stream.closed


FAMILIES = {
    "tags": ("{# <think> </think> #}", "<think>", "Hm.</think>\n\nYes.", "Hm.\n\nYes.\n", "Yes."),
    "messages": (
        "{# <|channel|> <|message|> <|channel|>analysis<|message|> #}",
        "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm.\n\nYes.\n",
        "Yes.",
    ),
    "no reasoning": ("{# <think> </think> #}", "", "Yes.", "Yes.\n", "Yes."),
}


@pytest.mark.parametrize(
    ("source", "begun", "text", "shown", "content"), FAMILIES.values(), ids=FAMILIES
)
def test_an_answer_is_shown_without_its_marks(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    source: str,
    begun: str,
    text: str,
    shown: str,
    content: str,
) -> None:
    with Model(tiny_model) as model:
        prompt = model.vocabulary.tokenize(f"Rain?{begun}\n", parse_special=True)
        reader = answer_reader(source, model.vocabulary, prompt)
        assert reader is not None
        assert answer_reader("{{ messages }}", model.vocabulary, prompt) is None
        writer = ReplyWriter(Terminal(), reader, PlainWriter(Terminal()))
        for index, character in enumerate(text[:-2]):
            writer.write(TokenEvent(character, 300, "target", index, None))
        writer.finish(text)
    assert capsys.readouterr().out == shown
    assert writer.content == content


def conversation_after(run: Run, models: Models, path: Path, *lines: str) -> list[str]:
    text = "".join(f"{line}\n" for line in (*lines, f"/save! {path}"))
    run("chat", "-m", models.target, "-n", 6, "-s", 1, *READABLE, input=text)
    return [message["content"] for message in json.loads(path.read_text())["messages"]]


@pytest.mark.parametrize("how", ["stopped", "before the first token", "failed"])
def test_the_conversation_stays_whole(
    run: Run, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "chat.json"
    before = conversation_after(run, models, path, "hello")
    assert len(before) == 2
    calls = 0

    def second_fails(stream: GenerationStream, writer: AnswerWriter) -> Answer:
        nonlocal calls
        calls += 1
        if calls != 2:
            return run_stream(stream, writer)
        if how == "stopped":
            raise KeyboardInterrupt
        if how == "failed":
            raise DecodeError("the backend failed", -3)
        stream.close()
        return Answer(stream.result, interrupted=True)

    monkeypatch.setattr(chat_loop, "run_stream", second_fails)
    assert conversation_after(run, models, path, "hello", "and more") == before
    calls = 0
    assert conversation_after(run, models, path, "hello", "/regen") == before
    calls = 0
    goes_on = conversation_after(run, models, path, "hello", "and more", "again")
    assert goes_on[:3] == [*before, "again"]


def test_a_text_larger_than_any_context_is_refused(
    run: Run, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("x" * 2_000_001)
    monkeypatch.setattr(terminal, "MAX_TEXT_BYTES", 2_000_000)
    result = run("generate", "-m", models.target, "-f", path)
    assert result.exit_code == 3
    assert "more than any context" in result.stderr
