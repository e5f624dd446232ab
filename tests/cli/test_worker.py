"""`specrun worker` and the options that use it: in processes of their own, ended by Ctrl-C."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest
from support.commands import started
from support.workers import free_port, listening, running_worker

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


def test_a_port_in_use(run: Run) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run("worker", "--port", port)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "choose another --port" in result.stderr


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
