"""Workers: the checks before ggml connects, and the detection of one that is gone.

Each kind of answer comes from a listener of the test's own; ggml itself would end the process.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.workers import free_port, listening, running_worker

from specrun.bindings.errors import OptionError, WorkerLostError
from specrun.bindings.machine import (
    PROTOCOL,
    Endpoint,
    Placement,
    add_workers,
    is_lost,
    is_reachable,
    placing,
    require_workers,
    workers,
)
from specrun.bindings.machine.devices import devices
from specrun.bindings.models import Model

HELLO = 1 + 8 + 24


@contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """HOST:PORT of a listener that answers each client so, in a thread of its own."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    answer(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def greeting(major: int, minor: int) -> Callable[[socket.socket], None]:
    """The answer of a worker of this version."""

    def answer(client: socket.socket) -> None:
        assert len(client.recv(HELLO, socket.MSG_WAITALL)) == HELLO
        client.sendall(struct.pack("<QBBBB", 28, major, minor, 3, 0) + bytes(24))

    return answer


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":50052", "host:port", "host:0", "host:65536", "::1:50052", "h:-1"],
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(OptionError, match="HOST:PORT"):
        Endpoint.parse(text)


def test_an_endpoint() -> None:
    assert str(Endpoint.parse(" localhost:50052 ")) == "localhost:50052"


def test_nobody_listens() -> None:
    worker = f"127.0.0.1:{free_port()}"
    with pytest.raises(OptionError, match=rf"no worker answers at {worker} .*specrun worker"):
        add_workers([worker])
    assert not is_reachable(worker)


def test_a_host_that_there_is_not() -> None:
    with pytest.raises(OptionError, match=r"no worker answers at no-such-host\.invalid:50052"):
        add_workers(["no-such-host.invalid:50052"])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(80)), "is no"),
        (lambda client: client.sendall(b"?"), "is no worker of llama.cpp"),
        (lambda client: None, "is no worker of llama.cpp"),
        (greeting(PROTOCOL[0] - 1, 0), rf"speaks version {PROTOCOL[0] - 1}\.0\.3 .*same version"),
        (greeting(PROTOCOL[0], PROTOCOL[1] + 1), "speaks version"),
    ],
    ids=["http", "too short", "closes", "older", "newer"],
)
def test_what_listens_is_no_worker_or_another_one(
    answer: Callable[[socket.socket], None], words: str
) -> None:
    with listener(answer) as worker, pytest.raises(OptionError, match=words):
        add_workers([worker])


def test_a_worker_that_serves_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SECONDS", 0.3)
    with (
        running_worker() as (worker, _),
        socket.create_connection(("127.0.0.1", Endpoint.parse(worker).port)),
        pytest.raises(OptionError, match=r"does not answer .* serves another client"),
    ):
        add_workers([worker])


def test_the_workers_version_is_the_one_that_is_asked_for() -> None:
    """`PROTOCOL` is not exported by the library: a server of it sends it."""
    with running_worker() as (worker, _), socket.socket() as client:
        client.connect(("127.0.0.1", Endpoint.parse(worker).port))
        client.sendall(struct.pack("<BQ", 14, 24) + bytes(24))
        assert tuple(client.recv(36, socket.MSG_WAITALL)[8:10]) == PROTOCOL


def test_a_worker_is_added_once_and_its_connection_watched(tiny_model: Path) -> None:
    with running_worker() as (worker, process):
        added = add_workers([worker, worker])
        assert add_workers([worker]) == added
        assert len(added) == 1
        # Nothing lies on it yet.
        assert not is_lost(worker)
        with placing(Placement(rpc=(worker,))):
            model = Model(tiny_model, n_gpu_layers=-1)
        # A hundred looks would fill the worker's queue, were they connections.
        assert all(is_reachable(worker) for _ in range(100))
        require_workers([worker])
        process.kill()
        process.wait()
        with pytest.raises(WorkerLostError, match=f"{worker}.* is gone: start it again"):
            require_workers([worker])
        assert not is_reachable(worker)
        with pytest.raises(WorkerLostError):
            add_workers([worker])
        model.close()  # ggml does not free memory that is gone
    # Memory elsewhere is freed all the same, and with it the connection.
    with running_worker() as (other, _):
        with placing(Placement(rpc=(other,))), Model(tiny_model, n_gpu_layers=-1):
            assert workers._ended_connections(other) == [False]
        assert workers._ended_connections(other) == []


def test_a_worker_that_was_used_before_is_asked_again(tiny_model: Path) -> None:
    """ggml remembers its devices, and would connect to whatever is there, or to nothing."""
    with running_worker() as (worker, process):
        with placing(Placement(rpc=(worker,))), Model(tiny_model, n_gpu_layers=-1):
            pass
        process.kill()
        process.wait()
        assert worker not in [device.worker for device in devices()]
        with (
            placing(Placement(rpc=(worker,))),
            pytest.raises(OptionError, match="no worker answers"),
        ):
            Model(tiny_model, n_gpu_layers=-1)
        with Model(tiny_model, n_gpu_layers=-1) as model:  # it is no business of others
            assert model.n_gpu_layers == 0 or model.placed.workers == ()


LOST = """
import sys
from specrun.runtime import Runtime, SamplingParams
from support.workers import running_worker

with running_worker() as (worker, process):
    with Runtime(sys.argv[1], rpc=[worker], n_gpu_layers="all", n_threads=1, n_ctx=256) as runtime:
        endless = {token: float("-inf") for token in runtime.vocabulary.end_of_generation}
        params = SamplingParams(logit_bias=endless)
        for number, event in enumerate(runtime.stream([1, 2, 3], params, max_tokens=50)):
            if number == 2:
                process.kill()
                process.wait()
print("still here")
"""


def test_a_worker_that_goes_away_in_an_answer_ends_the_process_with_a_sentence(
    tiny_model: Path,
) -> None:
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(tiny_model)],
        cwd=tests,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == WorkerLostError.exit_code
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: the worker 127.0.0.1:")
    assert "is gone, in the middle of an evaluation: start it again" in line


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_worker_ends_with_who_started_it(how: str) -> None:
    port = free_port()
    script = (
        "import sys, subprocess, time\n"
        "from support.workers import running_worker\n"
        f"with running_worker(port={port}):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
    assert listening(port)
    (process.kill if how == "killed" else process.terminate)()
    process.wait()
    for _ in range(200):
        if not listening(port):
            return
        threading.Event().wait(0.02)
    raise AssertionError("the worker has outlived the process that started it")
