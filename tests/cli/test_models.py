"""Models by name and from the hub, on the command line; and nobody's network without the flag."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.commands import PROGRAM
from support.mock_hub import MockHub, mock_hub
from support.stored_models import in_hub, in_ollama, in_studio
from support.tiny_dflash import TinyDFlash

from specrun.bindings.gguf import read_header

from .conftest import Models, Run

_SETTINGS = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "HF_ENDPOINT", "HF_TOKEN")


@pytest.fixture
def home(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, whose stores are empty."""
    for name in (*_SETTINGS, "LLAMA_CACHE", "HF_HUB_OFFLINE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECRUN_TRUST", "1")  # copies of models that the tests wrote
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / ".cache/huggingface/hub"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    return tmp_path


@pytest.fixture
def served(home: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> Any:
    files = {
        "ann/target-GGUF": {"target-Q4_K_M.gguf": models.target.read_bytes()},
        "ann/draft-GGUF": {"draft-Q8_0.gguf": models.plain.read_bytes()},
    }
    with mock_hub(files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


GENERATE = ("generate", "-p", "x", "-n", 4, "--temp", 0, "--json")


def test_hf_fetches_target_and_drafter(run: Run, models: Models, served: MockHub) -> None:
    plain = run(*GENERATE, "-m", models.target)
    result = run(*GENERATE, "-hf", "ann/target-GGUF", "-hfd", "ann/draft-GGUF:Q8_0")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["text"] == json.loads(plain.stdout)["text"]
    assert json.loads(result.stdout)["stats"]["drafter"].startswith("draft(")
    assert "fetching target-Q4_K_M.gguf, " in result.stderr
    again = run(*GENERATE, "-hf", "ann/target-GGUF", "--drafter", "draft(hf:ann/draft-GGUF, n=2)")
    assert again.exit_code == 0, again.stderr
    assert "fetching" not in again.stderr
    assert len(served.transfers) == 2
    served.requests.clear()
    for offline in (["--offline"], []):
        if not offline:
            os.environ["HF_HUB_OFFLINE"] = "1"
        try:
            alone = run(*GENERATE, "-m", "hf:ann/target-GGUF", *offline)
        finally:
            os.environ.pop("HF_HUB_OFFLINE", None)
        assert json.loads(alone.stdout)["text"] == json.loads(plain.stdout)["text"]
    assert served.requests == []


def test_the_kind_of_drafts_names_a_file_beside_the_model(
    run: Run, models: Models, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in llama.cpp: --spec-type draft-dflash takes dflash-*.gguf of the -hf repository."""
    sizes = read_header(models.target).metadata
    width, heads = sizes["llama.embedding_length"], sizes["llama.attention.head_count"]
    vocab = len(sizes["tokenizer.ggml.tokens"])
    files = {"target-Q4_K_M.gguf": models.target.read_bytes()}
    for generation in ("dflash", "dspark"):
        tiny = TinyDFlash(generation, vocab, width, heads, heads)
        path = tiny.write(tmp_path / f"{generation}.gguf", models.target)
        files[f"{generation}-target-Q8_0.gguf"] = path.read_bytes()
    with mock_hub({"ann/target-GGUF": files}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for kind in ("dflash", "dspark"):
            found = run(*GENERATE, "-hf", "ann/target-GGUF", "--spec-type", f"draft-{kind}")
            assert found.exit_code == 0, found.stderr
            stats = json.loads(found.stdout)["stats"]
            assert f"{kind}-target-Q8_0.gguf" in stats["drafter"]
        without = run(*GENERATE, "-hf", "ann/target-GGUF", "--spec-type", "draft-eagle3")
        assert without.exit_code == 3
        assert "eagle3-" in without.stderr


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("404", 3, "HTTP 404"),
        ("401", 3, "HF_TOKEN"),
        ("429", 1, "requires a pause"),
        ("half", 1, "the same command continues"),
        ("wrong", 3, "lacks the hash"),
    ],
)
def test_faults_of_the_hub_have_their_exit_codes(
    run: Run, home: Path, served: MockHub, fault: str, code: int, said: str
) -> None:
    served.fault = fault
    result = run(*GENERATE, "-hf", "ann/target-GGUF")
    assert (result.exit_code, result.stdout) == (code, "")
    lines = [line for line in result.stderr.splitlines() if not line.startswith("fetching")]
    assert len(lines) == 1
    assert said in lines[0]
    assert not any((home / ".cache").rglob("*.gguf"))


def test_what_is_misspelt_is_said_before_anything_is_fetched(run: Run, served: MockHub) -> None:
    for wrong in (["--tmep", 1], ["--temp", "hot"], ["-m", "x"], ["-m", "a.gguf"]):
        result = run(*GENERATE, "-hf", "ann/target-GGUF", *wrong)
        assert result.exit_code in (2, 3), result.stderr
    assert run(*GENERATE, "-hf", "target").exit_code == 2
    assert served.requests == []


def test_a_process_of_its_own_fetches_too(home: Path, served: MockHub) -> None:
    """Nothing else has imported parts of huggingface_hub there."""
    environment = {name: text for name, text in os.environ.items() if "SPECRUN" not in name}
    environment |= {"HOME": str(home), "HF_ENDPOINT": served.url, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*PROGRAM, "inspect", "hf:ann/draft-GGUF", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file"].endswith("draft-Q8_0.gguf")
    assert len(served.transfers) == 1


def test_the_environment_gives_way_to_what_is_typed(
    run: Run, models: Models, served: MockHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRUN_HF_REPO", "ann/target-GGUF")
    assert run(*GENERATE, "-m", models.target).exit_code == 0
    assert run(*GENERATE, "--demo", "--drafter", "none").exit_code == 0
    monkeypatch.setenv("SPECRUN_HF_REPO_DRAFT", "ann/draft-GGUF")
    plain = run(*GENERATE, "-m", models.target, "--drafter", "prompt-lookup")
    assert plain.exit_code == 0, plain.stderr
    assert served.requests == []
    assert run(*GENERATE, "--drafter", "none").exit_code == 0
    assert [name for name, _ in served.transfers] == ["target-Q4_K_M.gguf"]
    both = run(*GENERATE)
    assert json.loads(both.stdout)["stats"]["drafter"].startswith("draft(")
    assert len(served.transfers) == 2


COMMANDS = (
    ("chat",),
    ("generate", "-p", "x"),
    ("serve",),
    ("accelerate",),
    ("why",),
    ("inspect",),
    ("theory",),
    ("tune",),
    ("calibrate",),
    ("prove",),
    ("imatrix", "-f", __file__, "-o", "new.gguf"),
    ("bench", "drafters"),
    ("bench", "cascade"),
    ("datastore", "build", __file__, "-o", "new.store"),
    ("train", "eagle", "-o", "new"),
    ("convert", "folder"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_every_command_with_a_model_takes_hf_and_offline(
    run: Run, home: Path, command: tuple[str, ...]
) -> None:
    result = run(*command, "-hf", "ann/absent", "--offline")
    assert result.exit_code == 3, result.stderr
    assert "ann/absent is not in the cache" in result.stderr


def test_every_command_with_a_drafter_takes_hfd(run: Run, home: Path, models: Models) -> None:
    commands = ("chat", "serve", "accelerate", "why", "tune", "theory", "calibrate", "prove")
    for command in (*commands, "bench drafters", "bench cascade"):
        result = run(*command.split(), "-m", models.target, "-hfd", "ann/absent", "--offline")
        assert result.exit_code == 3, (command, result.stderr)
        assert "ann/absent is not in the cache" in result.stderr
    result = run("inspect", models.target, "-hfd", "ann/absent", "--offline")
    assert result.exit_code == 3


def test_files_of_arguments_may_lie_in_a_cache_which_is_not_written_to(
    run: Run, home: Path, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_hub(home, "ann/Tiny-GGUF", "tiny-F32.gguf", models.target)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = sorted((home / ".cache").rglob("*"))
    result = run("quantize", "tiny-gguf", "F16", "--offline")
    assert result.exit_code == 0, result.stderr
    assert [path.name for path in folder.iterdir()] == ["tiny-F16.gguf"]
    assert sorted((home / ".cache").rglob("*")) == before
    absent = run("quantize", "hf:ann/absent", "F16", "--offline")
    assert (absent.exit_code, "is not in the cache" in absent.stderr) == (3, True)


def test_nothing_opens_a_socket_without_the_flag(
    run: Run, home: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even huggingface_hub is imported; the control at the end must fail."""
    opened: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        opened.append(arguments)
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    in_hub(home, "ann/Tiny-GGUF", "tiny-F32.gguf", models.target)
    assert run("models").exit_code == 0
    assert run(*GENERATE, "-m", "tiny-gguf").exit_code == 0
    assert run(*GENERATE, "-m", "tiny-ggu").exit_code == 0
    assert run(*GENERATE, "-m", "ann/absent").exit_code == 3
    assert run("inspect", "tiny-gguf").exit_code == 0
    assert run(*GENERATE, "-hf", "ann/tiny-gguf", "--offline").exit_code == 3
    assert opened == []
    result = run(*GENERATE, "-hf", "ann/Other-GGUF")
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    assert opened


def test_names_that_fit_no_model_or_several(run: Run, home: Path, models: Models) -> None:
    in_hub(home, "ann/Tiny-GGUF", "tiny-Q8_0.gguf", models.target)
    in_ollama(home, "tiny", "latest", models.plain)
    several = run(*GENERATE, "-m", "tin")
    assert several.exit_code == 2
    assert "may be ann/Tiny-GGUF:Q8_0, tiny:latest: name one of them" in several.stderr
    unknown = run(*GENERATE, "-m", "tny-gguf:q8_0")
    assert unknown.exit_code == 3
    assert "did you mean ann/Tiny-GGUF:Q8_0?" in unknown.stderr


def test_the_list_shows_models_drafters_and_what_is_broken(
    run: Run, home: Path, models: Models
) -> None:
    in_hub(home, "ann/Tiny-GGUF", "tiny-Q8_0.gguf", models.target)
    in_ollama(home, "little", "latest", models.plain)
    in_studio(home, "bob/broken", "broken.gguf", models.plain).write_bytes(b"GGUF")
    result = run("models")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0][:2] == ["3", "models,"]
    assert rows[2][:3] == ["1", "ann/Tiny-GGUF:Q8_0", "hub"]
    assert rows[2][-2:] == ["chat", "2"]
    assert rows[3][:3] == ["2", "little:latest", "ollama"]
    assert rows[3][-1] == "text"
    assert rows[4][-1] == "damaged"
    assert "broken.gguf" in result.stderr
    told = json.loads(run("models", "--json").stdout)
    first = told["models"][0]
    assert (first["name"], first["store"], first["drafters"]) == (
        "ann/Tiny-GGUF:Q8_0",
        "hub",
        ["little:latest"],
    )
    assert first["bytes"] == models.target.stat().st_size
    assert first["vocabulary_sha256"] == told["models"][1]["vocabulary_sha256"]
    assert told["models"][2]["problem"]
    assert [line.split()[1] for line in run("models", "litt").stdout.splitlines()[2:]] == [
        "little:latest"
    ]
    assert run("models", "absent").exit_code == 3


def test_an_empty_list_says_how_to_fetch(run: Run, home: Path) -> None:
    result = run("models")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "-hf OWNER/REPO" in result.stderr
    assert json.loads(run("models", "--json").stdout) == {"models": [], "problems": []}
