"""`specrun worker` and the options that use it: in processes of their own, ended by Ctrl-C."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest
from support.commands import started
from support.workers import free_port, listening, running_worker

from specrun.cli.worker import _cache_folder

from .conftest import Models, Run


def test_it_serves_until_ctrl_c(run: Run, models: Models, tmp_path: Path) -> None:
    port = free_port()
    cache = tmp_path / "cache"
    with started("worker -t 1 --port", port, "--cache", cache) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line == f"specrun chat -m target.gguf -ngl all --rpc 127.0.0.1:{port}\n"
        arguments = ["-m", models.target, "-p", "hello", "-n", 8, "--temp", 0]
        here = run("generate", *arguments)
        there = run("generate", *arguments, "--rpc", f"127.0.0.1:{port}", "-ngl", "all")
        assert (there.exit_code, there.stdout) == (0, here.stdout)
        listed = run("generate", "--list-devices", "--rpc", f"127.0.0.1:{port}")
        assert listed.exit_code == 0
        assert listed.stdout.startswith("Available devices:\n  CPU: ")
        assert f": 127.0.0.1:{port} (worker, " in listed.stdout
        process.send_signal(signal.SIGINT)
        output, messages = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, b"")
    assert b"Traceback" not in messages
    assert b"Starting RPC server" in messages  # the server's own words, not on stdout
    assert cache.is_dir()
    assert not listening(port)


def test_a_service_manager_ends_it_as_ctrl_c_does() -> None:
    port = free_port()
    with started("worker -t 1 --port", port) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=20)
    assert process.returncode == 0
    assert b"Traceback" not in messages
    assert not listening(port)


def test_without_remote_clients_it_listens_on_the_loopback_only(run: Run) -> None:
    result = run("worker", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "neither authentication nor encryption: --allow-remote" in result.stderr


def test_a_port_in_use(run: Run) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run("worker", "--port", port)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "choose another --port" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mem", "lots"], "'lots' is no amount of memory: give such as 8G"),
        (["--mem", "0"], "'0' is no amount of memory"),
        (["--mem", "-1G"], "is no amount of memory"),
        (["--port", "0"], "0 is not in the range"),
        (["--host", "my-machine"], "'my-machine' is no IPv4 address"),
        (["--host", "8.8.8.8", "--allow-remote"], "cannot listen on 8.8.8.8:50052"),
        (["--device", "CUDA7"], "there is no device 'CUDA7'"),
    ],
)
def test_what_a_worker_cannot_be_told(run: Run, arguments: list[str], words: str) -> None:
    result = run("worker", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_cache_that_is_no_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("worker", "--port", free_port(), "--cache", tmp_path / "file")
    assert result.exit_code == 2
    assert "cannot be used (File exists): name a folder" in result.stderr
    assert _cache_folder(tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "CUDA7"], "there is no device 'CUDA7'"),
        (["--device", "CUDA0,,"], "'CUDA0,,' is not a list of names"),
        (["--device-draft", "NPU"], "there is no device 'NPU'"),
        (["--tensor-split", "a,b"], "'a,b' is not shares such as 3,1"),
        (["--tensor-split", "1,1"], "1,1 does not add up with 0 devices"),
        (["--split-mode", "row"], "split mode row cuts matrices, and there is no GPU that can"),
        (["-ot", "nothing"], "'nothing' is not PATTERN=DEVICE"),
        (["-ot", "(=CPU"], "is no regular expression"),
        (["-ot", "ffn_.*_exps=CPU"], "no tensor's name matches 'ffn_.*_exps'"),
        (["--rpc", "here"], "'here' is not HOST:PORT"),
        (["--rpc", "127.0.0.1:1"], "no worker answers at 127.0.0.1:1"),
    ],
)
def test_devices_that_are_not_there(
    run: Run, models: Models, arguments: list[str], words: str
) -> None:
    draft = ["-md", models.target] if "--device-draft" in arguments else []
    result = run("generate", "-m", models.target, "-p", "x", "-n", "1", *draft, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory so")
def test_a_worker_without_enough_memory(run: Run, models: Models) -> None:
    """Keys and values of more than the worker may have: refused in order, and it goes on."""
    arguments = ["-m", models.long, "-p", "hi", "-n", "2", "-ngl", "all"]
    with running_worker(memory=1 << 20) as (worker, process):
        # Beside what the worker needs itself: 16384 tokens at once do not fit, 256 do.
        large = run("generate", *arguments, "--rpc", worker, "-c", 16384, "-ub", 16384, "-b", 16384)
        assert process.poll() is None
        small = run("generate", *arguments, "--rpc", worker, "-c", 256)
    assert large.exit_code == 5
    assert "the plan, with 16,384 tokens of context:" in large.stderr
    assert "target compute" in large.stderr
    assert "-c 8192 takes" in large.stderr
    assert small.exit_code == 0
