"""The config file: defaults give way to it, it to the environment, and that to flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Models, Run


@pytest.fixture
def config(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("SPECRUN_CONFIG", str(path))
    return path


def n_tokens(run: Run, models: Models, *more: object) -> int:
    result = run("generate", "-m", models.target, "-p", "x", "--temp", 0, "--json", *more)
    assert result.exit_code == 0, result.stderr
    return int(json.loads(result.stdout)["usage"]["completion_tokens"])


def test_each_source_goes_before_the_next(
    run: Run, models: Models, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text('predict = 2\nlogit-bias = ["319-inf", "316-inf"]\n[chat]\npredict = 7\n')
    assert n_tokens(run, models) == 2
    config.write_text("predict = 2\n[generate]\npredict = 3\n")
    assert n_tokens(run, models) == 3
    monkeypatch.setenv("SPECRUN_PREDICT", "4")
    assert n_tokens(run, models) == 4
    monkeypatch.setenv("SPECRUN_GENERATE_PREDICT", "5")
    assert n_tokens(run, models) == 5
    assert n_tokens(run, models, "-n", 6) == 6


def test_a_model_of_the_file_gives_way_to_the_demo(
    run: Run, models: Models, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(f'model = "{models.target}"\n')
    assert run("generate", "-p", "x", "-n", 1).exit_code == 0
    assert run("generate", "-p", "x", "-n", 1, "--demo", "--drafter", "none").exit_code == 0
    monkeypatch.setenv("SPECRUN_DEMO", "1")
    assert run("generate", "-p", "x", "-n", 1, "--drafter", "none").exit_code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tmep = 1", "'tmep' is no option of any command: did you mean 'temp'?"),
        ("[generate]\npredcit = 1", "of specrun generate: did you mean 'predict'?"),
        ("[generate]\nzzz = 1", "`specrun config show COMMAND`"),
        ("[genrate]\ntemp = 1", "no command 'genrate': did you mean 'generate'?"),
        ("[bench.draft]\ntemp = 1", "no command 'draft'"),
        ("temp = ", "is not TOML"),
        pytest.param("temp = " + "[" * 100_000, "is not TOML", id="nested"),
        ('temp = "hot"', "--temp"),
        ("temp = true", "temp is true: give a value"),
        ("temp = [1, 2]", "takes one value"),
        ("temp = 1979-05-27", "takes one value"),
        ('quiet = "yes"', "give true or false"),
        ("draft-max = 3", "is no option"),
        ('model = "nowhere.gguf"', "there is no file nowhere.gguf"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(
    run: Run, models: Models, config: Path, text: str, said: str
) -> None:
    config.write_text(text)
    name = "bench drafters" if "bench" in text else "generate -p x"
    arguments = [] if "model" in text else ["-m", models.target]
    result = run(*name.split(), *arguments)
    assert result.exit_code == (3 if "model" in text else 2), result.stderr
    assert said in result.stderr
    assert str(config) in result.stderr or "model" in text
    assert len(result.stderr.splitlines()) == 1


def test_options_of_other_commands_are_no_mistake(run: Run, models: Models, config: Path) -> None:
    config.write_text("repetitions = 3\ntemp = 0\n[tune]\nspeed = 1\n")
    assert run("inspect", models.target).exit_code == 0


def test_help_does_not_depend_on_the_file(run: Run, config: Path) -> None:
    config.write_text("tmep = 1")
    assert run("generate", "--help").exit_code == 0
    assert run("--version").exit_code == 0


def test_show_and_path(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("config", "path").stdout == f"{config}\n"
    for name in ("SPECRUN_THREADS", "SPECRUN_ANYWAY"):
        monkeypatch.delenv(name)
    empty = run("config", "show")
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "there is no such file" in empty.stderr
    config.write_text("temp = 0.5\n[bench.drafters]\nrepetitions = 9\n")
    monkeypatch.setenv("SPECRUN_TOP_K", "7")
    rows = [line.split() for line in run("config", "show").stdout.splitlines()[2:]]
    assert rows == [
        ["all", "commands", "temp", "0.5", "file"],
        ["bench", "drafters", "repetitions", "9", "file"],
        ["SPECRUN_TOP_K", "7", "environment"],
    ]
    shown = run("config", "show", "generate").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["--temperature", "0.5", "file"] in rows or ["--temp", "0.5", "file"] in rows
    assert ["--top-k", "7", "environment"] in rows
    assert ["--ctx-size", "4096", "default"] in rows
    assert run("config", "show", "generat").exit_code == 2


def test_completion_scripts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("bash", "zsh", "fish"):
        result = run("completion", shell)
        assert result.exit_code == 0
        assert "_SPECRUN_COMPLETE" in result.stdout
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert "compdef" in run("completion").stdout
    monkeypatch.setenv("SHELL", "/bin/other")
    assert run("completion").exit_code == 2
    assert run("completion", "tcsh").exit_code == 2


def test_completion_offers_commands_and_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(line: str) -> list[str]:
        monkeypatch.setenv("_SPECRUN_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        found = run().stdout
        return [text.partition(",")[2] for text in found.splitlines()]

    assert completed("specrun mo") == ["models"]
    assert "--hf-repo" in completed("specrun chat --hf")


@pytest.mark.parametrize("command", [[], ["chat"], ["bench", "drafters"], ["models"]])
def test_manual_pages(run: Run, command: list[str]) -> None:
    result = run("man", *command)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    title = "\\-".join(["SPECRUN", *map(str.upper, command)])
    assert lines[0].startswith(f'.TH "{title}" 1 ')
    sections = [line for line in lines if line.startswith(".SH ")]
    assert sections[:4] == [".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH OPTIONS"]
    macros = {".TH", ".SH", ".SS", ".PP", ".TP", ".nf", ".fi"}
    assert {line.split()[0] for line in lines if line.startswith((".", "'"))} <= macros
    assert not [line for line in lines if "\b" in line or " - " in line]
    assert run("man", "nothing").exit_code == 2


def test_manual_pages_explain_arguments(run: Run) -> None:
    lines = run("man", "quantize").stdout.splitlines()
    place = lines.index("\\fBIN [OUT] TYPE\\fR")
    assert lines[place - 1] == ".TP"
    assert lines[place + 1].startswith("The model or heads")
    assert place < lines.index(".SH OPTIONS")


def test_a_model_has_options_of_its_own(
    run: Run, models: Models, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go before those of its command, and behind the environment and the flags."""
    table = f'[models."{models.target.stem.upper()}"]\npredict = 4\n'
    config.write_text(f'[generate]\npredict = 2\n{table}[models."other"]\npredict = 6\n')
    assert n_tokens(run, models) == 4
    assert n_tokens(run, models, "-n", 5) == 5
    monkeypatch.setenv("SPECRUN_PREDICT", "3")
    assert n_tokens(run, models) == 3
    monkeypatch.delenv("SPECRUN_PREDICT")
    monkeypatch.setenv("SPECRUN_MODEL", str(models.target))
    done = run("generate", "-p", "x", "--temp", 0, "--json")
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 4
    config.write_text(table.replace("predict", "predcit"))
    done = run("generate", "-p", "x")
    assert (done.exit_code, "did you mean 'predict'?" in done.stderr) == (2, True)
    config.write_text(f"[models]\njson = true\n{table}")  # of `specrun models`, beside
    assert run("models").stdout.startswith("{")
