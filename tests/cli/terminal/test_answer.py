"""Answers that are stopped or fail: what is shown, and what stays of the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
from specrun.runtime import DecodeError, GenerationStream, Usage
from specrun.runtime.round import ChatResult, TokenEvent

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


def result(text: str, reasoning: str) -> ChatResult:
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    stats: Any = None
    return ChatResult(text, [300], "stop", usage, stats, 7, reasoning, [], "raw")


@pytest.mark.parametrize("n_seen", [0, 1, 3, 4, 7])
def test_reasoning_is_shown_before_the_answer(
    capsys: pytest.CaptureFixture[str], n_seen: int
) -> None:
    """Whatever part was seen before Ctrl-C, all is shown, and once."""
    writer = ReplyWriter(Terminal(), PlainWriter(Terminal()))
    said = [("", letter) for letter in "Hm."] + [(letter, "") for letter in "Yes."]
    for index, (text, thought) in enumerate(said[:n_seen]):
        event = TokenEvent(text + thought, 300, "target", index, None)
        event.tell((), text, thought)
        writer.write(event)
    writer.finish(result("Yes.", "Hm."))
    assert capsys.readouterr().out == "Hm.\n\nYes.\n"


def test_folded_reasoning_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it comes its end is on a passing line, which the fold takes away."""
    terminal, now, lines = Terminal(), [100.0], []
    monkeypatch.setattr(terminal, "passing", lines.append)
    writer = ReplyWriter(terminal, PlainWriter(terminal), fold=True, clock=lambda: now[0])
    thought = "\x1b[2JThe user\nasks for a greeting. " * 20
    for index in range(0, len(thought), 10):
        event = TokenEvent(thought[index : index + 10], 300, "target", index, None)
        event.tell((), "", thought[index : index + 10])
        writer.write(event)
        now[0] += 0.25
    n_tokens = -(-len(thought) // 10)
    writer.write(TokenEvent("Yes.", 300, "target", 99, None))
    writer.finish(result("Yes.", thought))
    told = f"thought for {0.25 * n_tokens:.0f} s ({n_tokens + 1:,} tokens)"
    assert capsys.readouterr().out == f"{told}\nYes.\n"
    assert lines[0].startswith("thinking for 0 s (1 tokens): ")
    assert lines[-2].rstrip().endswith("a greeting.")
    assert all("\x1b" not in line and "\n" not in line and len(line) < 80 for line in lines)
    assert lines[-1] == ""


def test_an_answer_without_reasoning_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    writer = ReplyWriter(Terminal(), PlainWriter(Terminal()))
    writer.write(TokenEvent("Ye", 300, "target", 0, None))
    writer.finish(result("Yes.", ""))
    assert capsys.readouterr().out == "Yes.\n"


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
