"""Opening files to read, where a named pipe in their place would be waited for without an end."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from specrun.bindings.errors import MalformedFileError


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read its bytes.

    Raises `MalformedFileError` for a named pipe, a device or a socket, and what `open` raises.
    """
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115 - it is the caller's
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    shown = os.fsdecode(path)
    shown = shown if shown.isprintable() else repr(shown)
    raise MalformedFileError(f"{shown} is not a regular file, as this one has to be; name a file")


def without_waiting(name: str, flags: int) -> int:
    """Open as `os.open`, at once: a named pipe would otherwise wait for a writer."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file; raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read()
