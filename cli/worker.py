"""`specrun worker`: lends this machine's devices to another one's specrun or llama.cpp."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import click

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.cli.options.group import EVALUATION, MODEL, SectionedCommand
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import SIZE
from specrun.cli.terminal.screen import bytes_text
from specrun.cli.terminal.terminal import Terminal

_SECONDS_TO_START = 60.0
_EPILOG = """\b
Examples:
  specrun worker                                            for tries on this machine
  specrun worker --host 192.168.1.5 --allow-remote          for the machines of a network
  specrun worker --mem 8G --cache ~/.cache/specrun/workers  weights are sent once

The protocol has neither authentication nor encryption: everyone who reaches the port can use this
machine's memory and may take over the process. Listen on trusted networks only.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@MODEL.option("--host ADDRESS", "The address to listen on.", default="127.0.0.1")
@MODEL.option("--port N", "The port to listen on.", click.IntRange(1, 65535), default=50052)
@MODEL.flag("--allow-remote", "Also listen for other machines.")
@MODEL.option("--mem SIZE", "The most memory for clients, such as 8G.", SIZE)
@MODEL.option("--cache DIR", "Cache tensors on this machine, so that they are sent only once.")
@EVALUATION.option(
    "-dev, --device NAME,...",
    "The devices to lend.",
    show_default="every GPU, or else the CPU",
)
@EVALUATION.threads("The number of CPU threads.")
@terminal_options
def worker(
    terminal: Terminal,
    host: str,
    port: int,
    allow_remote: bool,
    mem: int | None,
    cache: str | None,
    device: str | None,
    threads: int,
) -> None:
    """Lend this machine's devices to another machine (llama.cpp's RPC server), until Ctrl-C.

    One client at a time; the next waits until it has left.
    """
    from specrun.bindings.machine.worker_process import (
        WorkerOptions,
        can_limit_memory,
        served_devices,
    )

    _check_address(host, port, allow_remote=allow_remote, terminal=terminal)
    if mem is not None and not can_limit_memory():
        raise OptionError("--mem needs Linux: this system does not bound a process's memory")
    names = None if device is None else tuple(device.split(","))
    served = served_devices(names)  # raises for names that there are not, before anything starts
    folder = None if cache is None else Path(cache).expanduser()
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"--cache {folder} cannot be used ({error.strerror or error})"
            raise OptionError(f"{problem}: name a folder") from None
    options = WorkerOptions(f"{host}:{port}", mem or 0, str(folder or ""), threads, names)
    process = subprocess.Popen(options.command(), stdin=subprocess.PIPE)
    try:
        with _terminated_as_interrupted():
            _await_start(process, host, port)
            listed = ", ".join(f"{item.name} ({item.description})" for item in served)
            limit = "" if mem is None else f", at most {bytes_text(mem)}"
            terminal.note(f"serving {listed}{limit} until Ctrl-C; on the other side:")
            terminal.answer(f"specrun chat -m target.gguf -ngl all --rpc {host}:{port}\n")
            code = process.wait()
    except KeyboardInterrupt:  # the way to end it
        return
    finally:
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    raise SpecrunError(f"the worker ended ({code}); the lines above have the reason")


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM, by which a service manager ends a worker, do as Ctrl-C does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_address(host: str, port: int, *, allow_remote: bool, terminal: Terminal) -> None:
    """Raise OptionError for an address that cannot be listened on, or that others can reach."""
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        advice = "an address of this machine such as 127.0.0.1 or 192.168.1.5"
        raise OptionError(f"--host {host!r} is no IPv4 address: give {advice}") from None
    risk = "the protocol has neither authentication nor encryption"
    if not address.is_loopback:
        if not allow_remote:
            advice = "--allow-remote does it all the same, on a trusted network"
            raise OptionError(f"{host} can be reached from other machines, and {risk}: {advice}")
        terminal.warn(f"other machines can reach {host}:{port}, and {risk}: trusted networks only")
    with socket.socket() as probe:
        # As the server does: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            problem = f"cannot listen on {host}:{port} ({reason})"
            raise OptionError(f"{problem}: choose another --port or --host") from None


def _await_start(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    """Wait until the worker listens; raises SpecrunError if it ends or does not start."""
    deadline = time.monotonic() + _SECONDS_TO_START
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    problem = f"the worker on {host}:{port} did not start"
    raise SpecrunError(f"{problem}; the lines above have the reason")
