"""Reads text files piece by piece, cut where lines end, so that no file has to fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from specrun.bindings.errors import FileMissingError, ModelError

__all__ = ["check_text_file", "text_pieces"]

_PIECE = 1 << 18


def check_text_file(path: Path) -> int:
    """Return the size of a text file in bytes; raises FileMissingError if it cannot be read."""
    if path.is_dir():
        raise FileMissingError(f"{path} is a folder: name its files, as in {path}/*.txt")
    try:
        with path.open("rb") as file:
            return file.seek(0, 2)
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read ({error.strerror}); check the name and permissions") from error


def text_pieces(path: Path, piece: int = _PIECE) -> Iterator[tuple[str, int]]:
    """Yield a file's text in pieces of about `piece` bytes, each with its size in bytes.

    Pieces end with a line where there is one, and never within a character. Raises `ModelError` for bytes that
    are not UTF-8.
    """
    done, rest = 0, b""
    try:
        with path.open("rb") as file:
            while True:
                read = file.read(piece)
                data = rest + read
                cut = _last_end(data) if read else len(data)
                if cut:
                    yield _decoded(data[:cut], done, path), cut
                done += cut
                rest = data[cut:]
                if not read:
                    return
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read ({error.strerror})") from error


def _last_end(data: bytes) -> int:
    """Return where to cut: behind the last line's end, else before the last character, which may be cut short."""
    line_end = data.rfind(b"\n") + 1
    if line_end:
        return line_end
    cut = len(data) - 1
    while cut > max(0, len(data) - 4) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return max(cut, 0)


def _decoded(data: bytes, offset: int, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text (byte {offset + error.start + 1}); convert it first") from error
