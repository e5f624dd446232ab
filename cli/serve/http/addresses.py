"""Addresses that a server listens on: bound before anything is loaded, and told on loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from specrun.bindings.errors import OptionError


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
    """Bind a socket, which does not listen yet; raises `OptionError` where that cannot be."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(f"--host {host!r} is no address here ({reason})") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        if os.name == "posix":  # elsewhere it would let two programs have the port
            # As servers do: a port whose last connections are still closing is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            reason = error.strerror or str(error)
            problem = f"cannot listen on {host}:{port} ({reason})"
            raise OptionError(f"{problem}: choose another --port or --host") from None
        yield listener


def url_of(host: str, listener: socket.socket) -> str:
    """Return the address that clients of this machine take."""
    port = listener.getsockname()[1]
    name = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
