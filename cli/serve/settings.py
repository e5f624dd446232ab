"""Settings of a server: its address, its keys, bounds of requests, defaults of answers."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from specrun.bindings.errors import MissingPackageError, OptionError
from specrun.runtime.laws import SamplingParams

_PACKAGES = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "sse_starlette": "sse-starlette",
    "prometheus_client": "prometheus-client",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most that a request may need, and the seconds that its arrival may take.

    A body has `body_seconds` and one more for every `body_rate` bytes of it, and may stop for
    `pause_seconds` at most. `connections` 0: as many as this process may have open files.
    """

    connections: int = 0
    header_seconds: float = 20.0
    body_bytes: int = 16 << 20
    body_seconds: float = 60.0
    body_rate: int = 16 << 10
    pause_seconds: float = 30.0
    depth: int = 64
    queue: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The address and the clients of a server, and the defaults of its answers.

    `host` is the address to listen on. On loopback, only requests for this machine's own names are
    answered: no web page can reach the server through a name that its owner points here (DNS
    rebinding). If there are `api_keys`, every client needs one. `cors` are the origins whose pages
    may send requests, "*" for all. Unfinished answers have `drain_seconds` when the server ends; a
    client that reads nothing for `send_seconds` is disconnected. A stream begins with its first
    token, or after `head_seconds`. `template_kwargs` are variables of the chat template that a
    request does not set itself. A model that is idle for `idle_seconds` is unloaded until the next
    request, if it can be loaded again; None: never.
    """

    model: str
    host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    bounds: Bounds = field(default_factory=Bounds)
    drain_seconds: float = 10.0
    send_seconds: float = 120.0
    head_seconds: float = 10.0
    idle_seconds: float | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def require_packages() -> None:
    """Raise `MissingPackageError` for the first package that is not installed."""
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError("specrun serve", package, "serve")


# -- Addresses, bound before a model is loaded ----------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, can only be reached from this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """Return the name in a Host header or an origin, without scheme and port."""
    name = value.rpartition("//")[2]
    if name.startswith("["):
        return name[1:].partition("]")[0].lower()
    return name.partition(":")[0].lower()


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket, which does not listen yet; raises `OptionError` if that fails."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(f"--host {host!r} is no address here ({reason})") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        if os.name == "posix":  # elsewhere it would let two programs have the port
            # As other servers do: a port is free while its last connections are still closing.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            reason = error.strerror or str(error)
            problem = f"cannot listen on {host}:{port} ({reason})"
            raise OptionError(f"{problem}: choose another --port or --host") from None
        yield listener


def url_of(host: str, listener: socket.socket) -> str:
    """Return the address for clients on this machine."""
    port = listener.getsockname()[1]
    name = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
