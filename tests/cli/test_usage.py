"""Wrong input: every mistake has its exit code and a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.cli.options import opening

from .conftest import Models, Run


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-c", -5], "--ctx-size"),
        (["-b", 0], "--batch-size"),
        (["-t", 100000], "--threads"),
        (["-s", -2], "--seed"),
        (["--spec-draft-n-max", 0], "--spec-draft-n-max"),
        (["--spec-draft-p-min", 1.5], "--spec-draft-p-min"),
        (["-ngl", -3], "--gpu-layers"),
        (["--samplers", "infill"], "is not in specrun"),
        (["--samplers", "top_k", "--sampling-seq", "k"], "give one of them"),
        (["--dry-sequence-breaker", ""], "dry_sequence_breakers"),
        (["--mirostat", 2, "--temp", 1, "--accept", "typical"], "is not exact"),
        (["-l", "99999+1"], "the model has 320 tokens"),
        (["--chat-template", "chatml"], "--chat-template-file"),
        (["--chat-template", "{{", "--no-chat-template"], "one of --chat-template"),
        (["--no-chat-template", "-sys", "x"], "-sys"),
        (["--demo"], "exclude each other"),
        (["--draft-max", 3], "--spec-draft-n-max"),
        (["--draft-n", 3], "--spec-draft-n-max"),
        (["--draft-min", 3], "--spec-draft-p-min"),
        (["-f", __file__], "one of -p and -f"),
        (["--tmep", 1], "--temp"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_nonsense_is_a_usage_error(
    run: Run, models: Models, arguments: list[object], named: str
) -> None:
    """Beside the lines of `golden/test_faces.py`, and the ranges in `options/`."""
    result = run("generate", "-m", models.target, "-p", "x", "-n", 1, *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_no_model(run: Run) -> None:
    result = run("generate", "-p", "x")
    assert result.exit_code == 2
    assert "-m FILE" in result.stderr


def test_an_unknown_command_is_answered_with_the_nearest(run: Run) -> None:
    result = run("generat")
    assert result.exit_code == 2
    assert "Did you mean 'generate'?" in result.stderr


def test_a_missing_file_is_answered_with_near_names(run: Run, models: Models) -> None:
    wrong = models.target.with_name("targte.gguf")
    for arguments in (["-m", wrong], ["-m", models.target, "--drafter", f'draft("{wrong}")']):
        result = run("generate", "-p", "x", *arguments)
        assert result.exit_code == 3
        assert f"Did you mean {models.target}" in result.stderr


def test_a_folder_is_answered_with_its_models(run: Run, models: Models, tmp_path: Path) -> None:
    result = run("generate", "-p", "x", "-m", models.target.parent)
    assert result.exit_code == 3
    assert "larger.gguf" in result.stderr
    assert run("generate", "-p", "x", "-m", tmp_path / "no" / "model.gguf").exit_code == 3


def test_a_file_that_is_no_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    result = run("generate", "-p", "x", "-m", path)
    assert result.exit_code == 3
    assert str(path) in result.stderr


def test_a_prompt_that_is_not_text(run: Run, models: Models) -> None:
    result = run("generate", "-m", models.target, input=b"ab\xff")
    assert result.exit_code == 3
    assert "not UTF-8 text (byte 3)" in result.stderr


def test_a_pair_that_does_not_fit(run: Run, models: Models) -> None:
    drafter = f'draft("{models.stranger}", vocabulary=same)'
    result = run("generate", "-m", models.target, "--drafter", drafter, "-p", "x")
    assert result.exit_code == 4
    assert "the target has 320 tokens, the drafter 600" in result.stderr


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


def test_a_template_that_tries_to_run_code(run: Run, models: Models) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    result = run("generate", "-m", models.target, "-p", "x", "--chat-template", escape)
    assert result.exit_code == 3
    assert "chat template" in result.stderr


def test_missing_embedded_models_are_explained(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(opening, "demo_target", lambda: tmp_path / "target.gguf")
    result = run("generate", "--demo", "-p", "x")
    assert result.exit_code == 3
    assert "the embedded models are not part of this installation" in result.stderr


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
