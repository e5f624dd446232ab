"""Workers on this machine's loopback, which end with the test that started them."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from specrun.bindings.machine.worker_process import WorkerOptions

__all__ = ["free_port", "listening", "running_worker"]


def free_port() -> int:
    """A port of the loopback that nothing listens on at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_worker(
    memory: int = 0, port: int = 0, cache: str = ""
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a worker that serves the CPU with one thread; gives HOST:PORT and the process."""
    port = port or free_port()
    worker = f"127.0.0.1:{port}"
    options = WorkerOptions(worker, memory, cache, n_threads=1)
    process = subprocess.Popen(
        options.command(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, stdout=None
    )
    try:
        while not listening(port):
            assert process.poll() is None, "the worker did not start"
            time.sleep(0.02)
        yield worker, process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def listening(port: int) -> bool:
    """Whether a connection to a port of the loopback is taken."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
