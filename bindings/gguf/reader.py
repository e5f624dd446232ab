"""Bounded reading of a GGUF file's first bytes, and names for files that are something else.

The file is hostile until proven otherwise. Every length is held against the size of the file and
against a fixed limit before anything is read or allocated for it, so time and memory are bounded
whatever the file says. The file is read, not mapped: a mapped file that shrinks meanwhile would
kill the process.
"""

from __future__ import annotations

import struct
from array import array
from io import FileIO
from typing import NoReturn

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.gguf.types import ArrayValue

# Far above any real model (about 40 MB and 1 M strings), and small enough that a file built to
# reach them costs a second or two.
MAX_HEADER_BYTES = 256 << 20
MAX_STRINGS = 4 << 20

AGAIN = "download it again"
_READ_STEP = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_CONVERT = "convert it with `specrun convert`"
_LEGACY = ("an old ggml file from before GGUF", "get the model as GGUF")
_ARCHIVE = ("a compressed archive", "unpack it first")

# What people pass by mistake: how it begins, what it is, what to do.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file it names", "run `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive, as PyTorch checkpoints are", _CONVERT),
    (b"\x80\x02", "a Python pickle, as old PyTorch checkpoints are", _CONVERT),
    *((start, "a Python pickle", _CONVERT) for start in (b"\x80\x03", b"\x80\x04", b"\x80\x05")),
    *((start, *_LEGACY) for start in (b"lmgg", b"fmgg", b"tjgg")),
    *((start, *_ARCHIVE) for start in (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00")),
    (b"7z\xbc\xaf\x27\x1c", *_ARCHIVE),
    (b"\x00\x00\x00\x00", "a download that never wrote its beginning", AGAIN),
)
_MARKUP = (b"<!doctype", b"<html", b"<head", b"<?xml")


class HeaderReader:
    """The beginning of the file, read as far as asked for and never beyond the limits."""

    def __init__(self, file: FileIO, size: int, shown: str) -> None:
        self.size = size
        self.position = 0
        self.strings_left = MAX_STRINGS
        self._file = file
        self._shown = shown
        self._data = bytearray()

    def fail(self, problem: str, advice: str = AGAIN) -> NoReturn:
        """Refuse the file in one sentence that begins with its path."""
        raise MalformedFileError(f"{self._shown} {problem}; {advice}")

    def damaged(self, problem: str) -> NoReturn:
        """Refuse the file because it contradicts itself."""
        self.fail(f"is damaged: {problem}")

    def require(self, end: int, what: str) -> int:
        """Have the bytes up to `end` in memory, for reading `what`; return how many are there."""
        if end > self.size:
            needed, left = end - self.position, self.size - self.position
            problem = f"{what} needs {needed:,} bytes where {left:,} are left"
            self.fail(f"is truncated or damaged: {problem}")
        if end > MAX_HEADER_BYTES:
            self.damaged(f"its header is larger than {MAX_HEADER_BYTES:,} bytes at {what}")
        while len(self._data) < end:
            chunk = self._file.read(_READ_STEP)
            if not chunk:
                self.damaged(f"it shrank to {len(self._data):,} bytes while it was being read")
            self._data += chunk
        return len(self._data)

    def head(self, count: int) -> bytes:
        """Return the first bytes of the file without moving on."""
        count = min(count, self.size)
        self.require(count, "its first bytes")
        return bytes(self._data[:count])

    def unpack(self, layout: struct.Struct, what: str) -> int | float:
        """Return one number and move behind it."""
        end = self.position + layout.size
        if end > len(self._data):
            self.require(end, what)
        value: int | float = layout.unpack_from(self._data, self.position)[0]
        self.position = end
        return value

    def u32(self, what: str) -> int:
        """Return an unsigned 32-bit number and move behind it."""
        return int(self.unpack(_U32, what))

    def u64(self, what: str) -> int:
        """Return an unsigned 64-bit number and move behind it."""
        return int(self.unpack(_U64, what))

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes and move behind them."""
        end = self.position + count
        self.require(end, what)
        with memoryview(self._data) as view:
            taken = bytes(view[self.position : end])
        self.position = end
        return taken

    def string(self, what: str) -> bytes:
        """Return the bytes of a string and move behind it."""
        return self.take(self.u64(f"the length of {what}"), what)

    def identifier(self, longest: int, what: str) -> str:
        """Return a key or name of at most `longest` bytes: UTF-8 without zero bytes."""
        length = self.u64(f"the length of {what}")
        if length > longest:
            self.damaged(f"{what} has {length:,} bytes, more than {longest:,}")
        raw = self.take(length, what)
        # llama.cpp cuts names at a zero byte, so two different names would become one.
        if b"\0" in raw:
            self.damaged(f"{what} contains a zero byte")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.damaged(f"{what} is not UTF-8")

    def string_array(self, count: int, what: str) -> ArrayValue:
        """Walk over `count` strings, keeping their bytes and ends, and move behind them."""
        self.strings_left -= count
        if self.strings_left < 0:
            self.damaged(f"{what} brings the file above {MAX_STRINGS:,} strings")
        ends = array("q")
        data, unpack_from = self._data, _U64.unpack_from
        start = position = self.position
        there = len(data)
        for _ in range(count):  # the hot loop: up to a million strings in large vocabularies
            if position + 8 > there:
                there = self.require(position + 8, what)
            position += 8 + unpack_from(data, position)[0]
            if position > there:
                there = self.require(position, what)
            ends.append(position - start)
        return ArrayValue("string", self.take(position - start, what), ends)


def check_magic(reader: HeaderReader) -> None:
    """Refuse a file that does not begin as GGUF files do, naming what it seems to be."""
    head = reader.head(64)
    if head.startswith(b"GGUF"):
        return
    if not head:
        reader.fail("is empty")
    if b"GGUF".startswith(head):
        reader.fail(f"is cut off after {len(head)} bytes")
    seems, advice = _resemblance(head, reader.size)
    reader.fail(f"is not a GGUF file: {seems}", advice)


def _resemblance(head: bytes, size: int) -> tuple[str, str]:
    for signature, kind, advice in _SIGNATURES:
        if head.startswith(signature):
            return f"it seems to be {kind}", advice
    if head.startswith(b"FUGG"):
        return "it seems to be a big-endian GGUF file", "get the little-endian file"
    # A safetensors file is a length and a JSON object of that length.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "it seems to be a safetensors file", _CONVERT
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(_MARKUP):
        return "it seems to be a web page or a server's error message", "download the file itself"
    if text.startswith(b"{"):
        return "it seems to be JSON text", "name the .gguf file"
    begins = f"it starts with the bytes {head[:4].hex(' ')} instead of 'GGUF'"
    return begins, f"check the path or {AGAIN}"
