"""Replaces a text in the header of a GGUF file that is being written, by another of the same length."""

from __future__ import annotations

import struct
from pathlib import Path

from specrun.bindings.errors import SpecrunError

__all__ = ["replace_text"]

_STRING = 8  # the number of the type
_SEARCHED = 1 << 20  # such keys stand before the words, at the start of the file


def replace_text(path: Path, key: str, old: str, new: str) -> None:
    """Change the value of `key` from `old` to `new`, in place."""
    if len(old.encode()) != len(new.encode()):
        raise SpecrunError(f"the value of {key} must keep its length: this is a mistake in specrun")
    with path.open("r+b") as file:
        head = file.read(_SEARCHED)
        before = struct.pack("<Q", len(key.encode())) + key.encode() + struct.pack("<IQ", _STRING, len(old.encode()))
        place = head.find(before + old.encode())
        if place < 0:
            raise SpecrunError(f"{path} has no {key} to replace: this is a mistake in specrun")
        file.seek(place + len(before))
        file.write(new.encode())
