"""`specrun doctor`: what it finds here, and how it reads a probe that died."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from specrun.bindings.threads import available_cores, find_processors
from specrun.cli import doctor as diagnosis
from specrun.cli.doctor import interpret

from .conftest import Run

Completed = subprocess.CompletedProcess[bytes]


def test_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "KERNEL_TYPES", ("Q4_0",))
    result = run("doctor", "--json")
    values = json.loads(result.stdout)
    assert result.exit_code == 0
    assert values["healthy"] is True
    assert {"specrun", "llama-cpp-python", "llama.cpp commit"} <= values["versions"].keys()
    threads, _, waiting = values["machine"]["threads"].partition(", waiting by ")
    assert int(threads) == available_cores()
    assert "spinning" in waiting
    assert values["machine"]["processors"].startswith(str(find_processors()))
    assert any(device["kind"] == "cpu" for device in values["devices"])
    details = {check["name"]: check["detail"] for check in values["checks"]}
    assert re.search(r"first opening of a file adds \d+\.\d s", details["embedded models"])
    states = {check["name"]: check["state"] for check in values["checks"]}
    assert (states["llama.cpp loads"], states["Q4_0 kernels"]) == ("ok", "ok")


def probes(monkeypatch: pytest.MonkeyPatch, kernels: Completed) -> None:
    """Let the probes answer without running: all is well but for the kernels."""
    engine = {
        "versions": {},
        "devices": [],
        "features": "CPU : AVX = 1 | AMX_INT8 = 0 | ",
        "processors": "4 on 2 cores",
        "threads": 2,
        "waiting": "spinning",
    }
    good = json.dumps({**engine, "gpu_offload": False}).encode()

    def answer(command: list[str], **_options: object) -> Completed:
        return (
            kernels if "kernels" in command else subprocess.CompletedProcess(command, 0, good, b"")
        )

    monkeypatch.setattr(subprocess, "run", answer)


def test_an_illegal_instruction_is_explained(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    probes(monkeypatch, subprocess.CompletedProcess([], -signal.SIGILL, b"", b""))
    result = run("doctor")
    assert result.exit_code == 1
    assert "illegal instruction" in result.stdout
    assert "-mno-amx-int8" in result.stderr
    assert "Something is broken" in result.stdout
    assert "CPU features  AVX\n" in result.stdout


def test_without_the_converter_kernels_are_not_tried(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes(monkeypatch, subprocess.CompletedProcess([], 1, b"", b""))
    monkeypatch.setattr(diagnosis, "find_spec", lambda _name: None)
    result = run("doctor", "--json")
    assert result.exit_code == 0
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["quantized kernels"]["state"] == "skipped"
    assert "'.[convert]'" in checks["quantized kernels"]["detail"]


def test_a_probe_that_never_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **_options: object) -> Completed:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", hang)
    result = run("doctor")
    assert result.exit_code == 1
    assert "no answer within" in result.stdout


@pytest.mark.parametrize(
    ("exit_code", "output", "messages", "state", "detail"),
    [
        (0, b'{"tokens": 4}', b"", "ok", ""),
        (0, b'{"error": "ImportError: no llama_cpp"}', b"", "failed", "no llama_cpp"),
        (-signal.SIGILL, b"", b"", "failed", "illegal instruction"),
        (0xC000001D, b"", b"", "failed", "illegal instruction"),
        (-signal.SIGSEGV, b"", b"", "failed", "signal SIGSEGV"),
        (1, b"", b"Traceback\nValueError: x\n", "failed", "exit code 1): ValueError: x"),
        (-99, b"", b"", "failed", "exit code -99"),
    ],
)
def test_how_a_probe_ended(
    exit_code: int, output: bytes, messages: bytes, state: str, detail: str
) -> None:
    answer, check = interpret("a probe", exit_code, output, messages)
    assert (check.name, check.state) == ("a probe", state)
    assert detail in check.detail
    assert (check.remedy != "") == (state == "failed")
    assert (answer != {}) == (state == "ok")
