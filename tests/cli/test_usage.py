"""Wrong input: every mistake has its exit code and a sentence that says what to do."""

from __future__ import annotations

import pytest

from .conftest import Models, Run


def test_a_prompt_that_is_not_text(run: Run, models: Models) -> None:
    result = run("generate", "-m", models.target, input=b"ab\xff")
    assert result.exit_code == 3
    assert "not UTF-8 text (byte 3)" in result.stderr


@pytest.mark.parametrize(("layers", "warned"), [("all", True), ("7", True), ("0", False)])
def test_layers_for_a_gpu_that_is_not_there(
    run: Run, models: Models, monkeypatch: pytest.MonkeyPatch, layers: str, warned: bool
) -> None:
    monkeypatch.setattr("specrun.bindings.machine.devices.offload_devices", lambda _found: [])
    result = run("generate", "-m", models.target, "-p", "x", "-n", 2, "-q", "-ngl", layers)
    assert result.exit_code == 0
    assert (f"-ngl {layers} is ignored" in result.stderr) == warned


def test_a_draft_model_larger_than_the_target_is_warned_of(run: Run, models: Models) -> None:
    base = ["generate", "-p", "x", "-n", 2, "-q"]
    swapped = run(*base, "-m", models.target, "-md", models.larger)
    assert swapped.exit_code == 0
    assert "larger than the target" in swapped.stderr
    assert "larger" not in run(*base, "-m", models.larger, "-md", models.target).stderr


def test_a_prompt_larger_than_the_context(run: Run, models: Models) -> None:
    result = run("generate", "-m", models.target, "-c", 256, "-p", "xyz" * 200)
    assert result.exit_code == 5
    assert "raise the context size (-c)" in result.stderr


def test_a_model_without_a_template_names_the_flag(run: Run, models: Models) -> None:
    result = run("chat", "-m", models.plain, "-n", 3, "--temp", 0, input="hello\n")
    assert result.exit_code == 0
    assert "--chat-template-file" in result.stderr
    plain = ("--no-chat-template", "-n", 3, "--temp", 0)
    told = run("chat", "-m", models.plain, *plain, input="hello\n")
    assert (told.exit_code, told.stdout) == (0, result.stdout)
    assert "--chat-template-file" not in told.stderr


@pytest.mark.parametrize("command", [[], ["chat"]])
def test_every_command_explains_itself(run: Run, command: list[str]) -> None:
    result = run(*command, "-h")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert run(*command, "--help").stdout == result.stdout
