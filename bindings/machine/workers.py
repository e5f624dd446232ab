"""RPC workers (ggml-rpc): devices of other processes and machines, as llama.cpp reaches them.

ggml-rpc ends the process if it cannot go on: if a worker does not answer, has another version of
the protocol, or goes away. So a worker is checked before ggml connects to it (`add_workers`),
and again before every answer (`require_workers`). One that goes away in the middle of an
answer ends the process all the same, with a sentence in the place of a stack trace.

A worker serves one client at a time, and only one more can wait: a check must not take that place
in the queue. If this process is connected, its own connection shows whether the worker runs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.errors import OptionError, WorkerLostError
from specrun.bindings.functions import call
from specrun.bindings.installation import build_command
from specrun.bindings.threads import FORK

PROTOCOL = (7, 0)
"""The version of ggml-rpc's protocol, major and minor, in the llama.cpp that is pinned."""

_SECONDS = 5.0  # to connect, and to be greeted
_HELLO, _CAPABILITIES = 14, 24  # RPC_CMD_HELLO, RPC_CONN_CAPS_SIZE
# Seconds of silence, seconds between the system's questions, and how many go unanswered.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
_OPEN_FILES = Path("/dev/fd")

_added: dict[str, list[int]] = {}  # worker -> its devices; ggml never forgets them
_seen: set[tuple[str, int]] = set()  # connections that were alive: worker, number of the socket
_keep_alive: list[object] = []


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a worker."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Return the endpoint of HOST:PORT; raises OptionError."""
        host, colon, port = text.strip().rpartition(":")
        known = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
        if not (colon and host and known) or ":" in host:
            example = "HOST:PORT, such as 192.168.1.5:50052"
            raise OptionError(f"the worker {text!r} is not {example}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def rpc_function(name: str, result: Any, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes types
    """Return a function of ggml's RPC backend; raises OptionError if llama.cpp has none."""
    registry = call("ggml_backend_reg_by_name")(b"RPC")
    find = call("ggml_backend_reg_get_proc_address")
    address: int | None = find(registry, name.encode()) if registry else None
    if not address:
        problem = "this build of llama.cpp cannot use other machines (GGML_RPC is off)"
        builds = build_command("make chat", "GGML_RPC=ON")
        raise OptionError(f"{problem}: {builds} builds one that can")
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def add_workers(workers: Sequence[str]) -> list[int]:
    """Return ggml's handles of the devices of these workers, in order, which can then be used.

    Raises OptionError for a text that is no HOST:PORT, a worker that does not answer, serves
    another client, is no worker or has another version of the protocol; WorkerLostError for one on
    which something lies that has gone away.
    """
    endpoints = [Endpoint.parse(text) for text in workers]
    if endpoints:
        rpc_function("ggml_backend_rpc_add_server", None)  # raises if there is none
    devices: list[int] = []
    for endpoint in dict.fromkeys(endpoints):
        worker = str(endpoint)
        if worker in _added:
            require_workers([worker])
        # ggml's own connection would wait for ever, or end the process.
        if worker not in _added or not _ended_connections(worker):
            _greet(endpoint)
        if worker not in _added:
            _add(endpoint)
        devices += _added[worker]
    return devices


def worker_of(device: int) -> str | None:
    """Return the HOST:PORT of the worker that a device belongs to, None for devices of this host"""
    return next((worker for worker, devices in _added.items() if device in devices), None)


def is_reachable(worker: str) -> bool:
    """Whether a worker can be reached: by this process's own connection, or else by a new one.

    A new one stays in the worker's queue until its client has left: without one that is at once.
    """
    ended = _ended_connections(worker)
    if ended:
        return not any(ended)
    with suppress(OSError), _connect(Endpoint.parse(worker)):
        return True
    return False


def is_lost(worker: str) -> bool:
    """Whether something of this process lies on a worker that cannot be reached any more."""
    if _OPEN_FILES.is_dir():
        return any(_ended_connections(worker))
    return not is_reachable(worker)


def freed_while_there(free: Callable[[int], None], workers: Sequence[str]) -> Callable[[int], None]:
    """Return the function that frees a pointer unless one of the workers that it lies on is lost.

    ggml would request that worker to free its part, and end the process without an answer.
    """

    def free_there(pointer: int) -> None:
        if not any(map(is_lost, workers)):
            free(pointer)

    return free_there if workers else free


def require_workers(workers: Iterable[str]) -> None:
    """Raise WorkerLostError for the first of these workers that is lost."""
    for worker in workers:
        if is_lost(worker):
            problem = f"the worker {worker}, which holds a part of the model, is gone"
            raise WorkerLostError(f"{problem}: start it again, and then specrun")


# -- connecting ------------------------------------------------------------------------------------


def _add(endpoint: Endpoint) -> None:
    add = rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    _explain_aborts()
    registry = add(str(endpoint).encode())
    if not registry:
        raise OptionError(f"the worker {endpoint} offers no device: start it again")
    call("ggml_backend_register")(registry)
    count, get = call("ggml_backend_reg_dev_count")(registry), call("ggml_backend_reg_dev_get")
    _added[str(endpoint)] = [get(registry, number) for number in range(count)]
    FORK.note_work()  # the connection has a thread of its own


def _connect(endpoint: Endpoint) -> socket.socket:
    # As ggml does, by the first address of version 4.
    address = socket.gethostbyname(endpoint.host)
    return socket.create_connection((address, endpoint.port), timeout=_SECONDS)


def _greet(endpoint: Endpoint) -> None:
    """Greet the worker as ggml will, within some time; raises OptionError for a wrong answer."""
    start = f"`specrun worker --port {endpoint.port}` starts one"
    busy = "either it is not there, or it serves another client: one at a time"
    silent = f"the worker {endpoint} does not answer within {_SECONDS:.0f} s: {busy}"
    try:
        connection = _connect(endpoint)
    except TimeoutError:  # nobody is there, or the queue is full
        raise OptionError(silent) from None
    except OSError as error:
        reason = error.strerror or str(error) or "no answer"
        raise OptionError(f"no worker answers at {endpoint} ({reason}): {start}") from None
    with closing(connection):
        try:
            size = struct.pack("<BQ", _HELLO, _CAPABILITIES)
            connection.sendall(size + bytes(_CAPABILITIES))
            answer = _received(connection, 8 + 4 + _CAPABILITIES)
        except TimeoutError:
            raise OptionError(silent) from None
        except OSError:
            answer = b""
    known = len(answer) == 8 + 4 + _CAPABILITIES
    if not known or struct.unpack_from("<Q", answer)[0] != 4 + _CAPABILITIES:
        raise OptionError(f"the program at {endpoint} is no worker of llama.cpp: {start}")
    major, minor, patch = answer[8:11]
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        other, own = f"{major}.{minor}.{patch}", f"{PROTOCOL[0]}.{PROTOCOL[1]}"
        problem = f"the worker {endpoint} speaks version {other} of the protocol, specrun {own}"
        raise OptionError(f"{problem}: use the same version of specrun on both sides")


def _received(connection: socket.socket, n_bytes: int) -> bytes:
    """Return so many bytes, or fewer if the other side ended."""
    data = b""
    while len(data) < n_bytes:
        piece = connection.recv(n_bytes - len(data))
        if not piece:
            break
        data += piece
    return data


# -- watching --------------------------------------------------------------------------------------


def _ended_connections(worker: str) -> list[bool]:
    """Return for each connection of this process to a worker, made by ggml, whether it has ended.

    Empty if nothing lies on the worker, and on systems that do not show a process its files.
    """
    endpoint, ended = Endpoint.parse(worker), []
    try:
        peer = (socket.gethostbyname(endpoint.host), endpoint.port)
        names = os.listdir(_OPEN_FILES)
    except OSError:
        return []
    for name in names:
        with suppress(OSError, ValueError):
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            # A reset connection has no other side any more: it is known by its own number.
            known = (worker, status.st_ino)
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if _is_connected_to(connection, peer):
                    _seen.add(known)
                    ended.append(_has_ended(connection))
                elif known in _seen:
                    ended.append(True)
    return ended


def _is_connected_to(connection: socket.socket, peer: tuple[str, int]) -> bool:
    try:
        return connection.family == socket.AF_INET and connection.getpeername() == peer
    except OSError:
        return False


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side of a connection is gone.

    The system notices a process or a machine that ends in order. A machine that falls silent is
    found by probes, which are set up here.
    """
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    watch = select.poll()  # Windows has none, and does not come here
    gone = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
    watch.register(connection, gone)
    return bool(watch.poll(0))


@functools.cache
def _explain_aborts() -> None:
    """Let a worker that goes away in an evaluation end this process with a sentence.

    ggml then calls abort: no call returns, and nothing can be raised.
    """

    def explain(message: bytes | None) -> None:
        text = (message or b"").decode("utf-8", "replace")
        if "RPC" not in text and "Failed to connect" not in text:
            os.write(2, f"{text}\n".encode())  # ggml's own message; then it ends the process
            return
        lost = [worker for worker in _added if is_lost(worker)]
        subject = f"the worker {lost[0]} is gone" if lost else "a worker answered with nonsense"
        advice = "start it again, and then specrun"
        os.write(2, f"Error: {subject}, in the middle of an evaluation: {advice}\n".encode())
        os._exit(WorkerLostError.exit_code)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(explain)
    _keep_alive.append(callback)
    call("ggml_set_abort_callback")(callback)
