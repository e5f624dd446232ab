"""/model, /drafter and /accept switch while the conversation stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from specrun.bindings.errors import OutOfMemoryError
from specrun.cli.chat import loop as chat_models

from ..conftest import READABLE, Models, Run

Talk = Callable[..., Result]


@pytest.fixture
def talk(run: Run, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)

    def chat(*lines: str, options: tuple[object, ...] = ()) -> Result:
        base = ["chat", "-m", models.target, "-n", 6, "--temp", 0, *READABLE]
        return run(*base, *options, input="".join(f"{line}\n" for line in lines))

    return chat


def test_a_switch_of_drafter_or_rule_changes_no_word(talk: Talk, models: Models) -> None:
    plain = talk("hello", "and again")
    switched = talk(
        "hello",
        "/drafter prompt-lookup",
        "/accept block",
        f'/drafter draft("{models.plain}", n=3)',
        "and again",
    )
    assert switched.exit_code == 0, switched.stderr
    assert switched.stdout == plain.stdout
    assert "drafter prompt-lookup · block" in switched.stderr
    assert f"drafter draft({models.plain}" in switched.stderr.replace('"', "")


def test_a_file_drafts_as_with_md(talk: Talk, models: Models) -> None:
    result = talk(f"/drafter {models.plain}", "/show", "/drafter none", "/drafter")
    said = [line.split() for line in result.stderr.splitlines()]
    assert ["drafter", f"draft({models.plain})", "·", "exact"] in said
    assert said[-1] == ["drafter", "none", "·", "exact"]


def test_another_model_answers_the_same_conversation(
    talk: Talk, run: Run, models: Models, tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    result = talk("hello", f"/model {models.long}", "/model", "and again", f"/save {saved}")
    assert result.exit_code == 0, result.stderr
    assert f"  model {models.long}" in result.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    # What the other model says is what it says to this conversation from the start.
    file = tmp_path / "before.json"
    file.write_text(json.dumps({**json.loads(saved.read_text()), "messages": messages[:2]}))
    lines = f"/load {file}\nand again\n"
    alone = run("chat -n 6 --temp 0 -m", models.long, *READABLE, input=lines)
    assert alone.stdout.splitlines()[-1] == messages[-1]["content"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/drafter promptlookup", "no drafter 'promptlookup': did you mean 'prompt-lookup'"),
        ("/drafter draft(nowhere.gguf)", "no file nowhere.gguf"),
        ("/drafter nowhere.gguf", "no file nowhere.gguf"),
        ("/accept exat", "no acceptance rule 'exat'"),
        ("/model nowhere.gguf", "no file nowhere.gguf"),
        ("/model nowhere", "no model of that name"),
        ("/modl x", "did you mean /model?"),
    ],
)
def test_what_cannot_be_leaves_everything_as_it_was(
    talk: Talk, models: Models, command: str, said: str
) -> None:
    plain = talk("hello", "and again").stdout
    result = talk("hello", command.format(plain=models.plain), "/show", "and again")
    assert said in result.stderr
    assert result.stdout == plain
    assert str(models.target) in result.stderr
    assert result.exit_code in (2, 3)


def test_where_the_way_back_fails_the_next_command_says_so(
    talk: Talk, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = chat_models.open_models
    calls = []

    def open_once(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        if len(calls) in (2, 3):
            raise OutOfMemoryError("no memory")
        return opened(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(chat_models, "open_models", open_once)
    result = talk("/drafter prompt-lookup", "hello", f"/model {models.target}", "hello")
    assert "no memory" in result.stderr
    assert "no model is open: /model NAME opens one" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_a_session_is_kept_for_the_model_that_it_was_for(
    talk: Talk, models: Models, tmp_path: Path
) -> None:
    file = tmp_path / "a.session"
    kept = talk("hello", "/drafter prompt-lookup", "and again", options=("--session", file))
    assert "tokens kept" in kept.stderr
    before = file.read_bytes()
    other = talk("hello", f"/model {models.long}", "and again", options=("--session", file))
    assert "stays as it was" in other.stderr
    assert file.read_bytes() == before
