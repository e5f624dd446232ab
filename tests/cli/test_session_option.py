"""--session: a second run evaluates only what is new of its prompt."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Models, Run

PROMPT = "abc" * 60


def usage(run: Run, models: Models, *more: object) -> tuple[str, int]:
    result = run("generate", "-m", models.plain, "-n", 4, "--temp", 0, "--json", *more)
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    return values["text"], values["usage"].get("cached_tokens")


def test_the_second_run_takes_up_the_first(run: Run, models: Models, tmp_path: Path) -> None:
    file = tmp_path / "a.session"
    plain = usage(run, models, "-p", PROMPT)
    assert plain[1] is None
    assert usage(run, models, "-p", PROMPT, "--session", file) == (plain[0], 0)
    text, cached = usage(run, models, "-p", PROMPT, "--session", file)
    assert (text, cached > 100) == (plain[0], True)
    note = run("generate", "-m", models.plain, "-n", 1, "-p", PROMPT, "--session", file).stderr
    assert "tokens of an earlier run are cached" in note


def test_what_does_not_fit_is_refused(run: Run, models: Models, tmp_path: Path) -> None:
    file = tmp_path / "a.session"
    usage(run, models, "-p", PROMPT, "--session", file)
    before = file.read_bytes()
    for arguments, code, said in (
        (["-m", models.larger], 4, "another model or settings: its model is"),
        (["-m", models.plain, "-ctk", "f32"], 4, "its cache types is f16, f16"),
    ):
        result = run("generate", *arguments, "-n", 1, "-p", "x", "--session", file)
        assert (result.exit_code, result.stdout) == (code, "")
        assert said in result.stderr
    assert file.read_bytes() == before
    file.write_bytes(b"no session")
    result = run("generate", "-m", models.plain, "-n", 1, "-p", "x", "--session", file)
    assert result.exit_code == 3
    result = run("generate", "-m", models.plain, "-p", "x", "--session", tmp_path / "no" / "a")
    assert result.exit_code == 3


def test_a_chat_keeps_its_cache(run: Run, models: Models, tmp_path: Path) -> None:
    file = tmp_path / "chat.session"
    for _ in range(2):
        result = run("chat", "-m", models.target, "-n", 3, "--session", file, input="Hello there\n")
        assert result.exit_code == 0
        assert "tokens kept" in result.stderr
    assert "tokens of an earlier run are cached" in result.stderr
