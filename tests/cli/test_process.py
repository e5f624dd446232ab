"""The installed program as a process: exit codes, closed pipes, Ctrl-C, and what it imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from support.commands import PROGRAM, run, started
from support.ctrl_c import hearing_ctrl_c

from .conftest import ENDLESS, Models

pytestmark = pytest.mark.long

posix = pytest.mark.skipif(os.name == "nt", reason="signals and file descriptors of POSIX")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
SHORT = "-n 2 -t 1 -q"


def endless(models: Models) -> list[object]:
    return ["generate -p hello -c 0 -m", models.long, *ENDLESS]


@posix
def test_a_closed_stdout_ends_quietly(models: Models) -> None:
    with started(*endless(models)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        messages = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert messages == b""


@posix
@pytest.mark.parametrize("command", ["--help", "generate --help", "inspect FILE"])
def test_a_stdout_that_nobody_reads_is_no_error(models: Models, command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [str(models.target) if word == "FILE" else word for word in command.split()]
    done = subprocess.run(
        [*PROGRAM, *arguments], stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@posix
def test_ctrl_c_prints_what_there_is_and_ends_with_130(models: Models) -> None:
    with started(*endless(models)) as process:
        assert process.stdout is not None
        first = process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        output, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 40
    assert output.endswith(b"\n")
    assert b"TTFT" in messages
    assert b"Traceback" not in messages


@posix
@pytest.mark.parametrize("module", ["specrun.cli.main", "specrun.cli.generate"])
def test_ctrl_c_during_an_import_is_quiet(module: str) -> None:
    code = f"""
import sys
import time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
from specrun.cli.entry import main
sys.argv[1:] = ["generate", "-p", "x", "--demo"]
main()
"""
    with hearing_ctrl_c():
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        output, messages = process.communicate(timeout=60)
    assert (process.returncode, output, messages) == (130, b"", b"")


def test_the_installed_script_begins_there() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"specrun": "specrun.cli.entry:main"}


@posix
def test_ctrl_c_with_json_prints_a_cancelled_answer(models: Models) -> None:
    # Nothing is printed before the end: the log says when the context is made, and the answer
    # begins soon after.
    for delay in (0.3, 1.0, 2.0):
        with started(*endless(models), "--json", "-vv") as process:
            assert process.stderr is not None
            for line in process.stderr:
                if b"compute buffer" in line:
                    break
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        if output and json.loads(output)["token_ids"]:
            break
    values = json.loads(output)
    assert values["finish_reason"] == "cancelled"
    assert values["usage"]["completion_tokens"] == len(values["token_ids"]) > 0


@posix
def test_streams_that_are_closed_from_the_start(models: Models) -> None:
    command = [*PROGRAM, "generate", "-m", str(models.target), "-p", "x", "-n", "3", "-t", "1"]
    done = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], timeout=60, check=False
    )
    assert done.returncode == 0


def test_an_encoding_without_the_character_does_not_end_the_answer(models: Models) -> None:
    command = [*PROGRAM, *f"generate -p x {SHORT} -m".split(), str(models.target)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    # Token 255 is the byte FF, which is no UTF-8: it becomes U+FFFD, which ASCII lacks.
    done = subprocess.run(
        [*command, "-l", "255+1000"], capture_output=True, env=environment, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"\\ufffd\\ufffd\n")


def test_bytes_that_are_no_text_do_not_end_a_chat(models: Models) -> None:
    command = [*PROGRAM, *f"chat {SHORT} --no-show-timings -m".split(), str(models.target)]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(
        command,
        input=b"\xff\xfe\nhello\n",
        capture_output=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


def test_help_and_completion_import_no_engine() -> None:
    code = """
import sys
import time
from specrun.cli.main import cli
try:
    cli(["--help"], prog_name="specrun")
except SystemExit:
    pass
heavy = {"llama_cpp", "torch", "numpy", "rich", "prompt_toolkit", "jinja2"} & set(sys.modules)
heavy |= {name for name in sys.modules if name.startswith("specrun.runtime.")}
print(sorted(heavy), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "generate" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [((), None), (("--pad-to", "1M"), "the package gguf")],
    ids=["as it is", "padded: gguf writes it"],
)
def test_drafters_are_compared_without_the_packages_that_convert(
    models: Models, arguments: tuple[str, ...], needs: str | None
) -> None:
    """A wheel's user has numpy and llama.cpp: what only converting needs is asked for then."""
    code = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("gguf", "safetensors", "tokenizers", "yaml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from specrun.cli.main import main
main()
"""
    asked = ["bench", "drafters", "-m", models.target, "-p", "a", "-n", 2, "-r", 1]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, [*asked, "--drafter", "none", *arguments])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) == (needs is None)
    assert (needs or "") in done.stderr


def test_version_names_everything_that_matters() -> None:
    done = run("--version")
    *named, backends = done.stdout.splitlines()
    lines = dict(line.rsplit(" ", 1) for line in named)
    assert (done.exit_code, done.stderr) == (0, "")
    assert {"specrun", "llama-cpp-python", "llama.cpp", "llama.cpp commit"} <= lines.keys()
    assert backends.startswith("backends CPU")
