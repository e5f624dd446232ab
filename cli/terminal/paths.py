"""Paths that users type: what is wrong with one, and what they may have meant."""

from __future__ import annotations

import difflib
from pathlib import Path

from specrun.bindings.errors import FileMissingError, ModelError
from specrun.cli.terminal.terminal import one_line

MAX_TEXT_BYTES = 64 * 1024 * 1024


def require_file(path: Path) -> Path:
    """Return `path` if it is there; raises FileMissingError with near names of its folder."""
    if path.is_dir():
        raise FileMissingError(f"{_shown(path)} is a folder{_files_in(path)}")
    if not path.exists():
        if not path.parent.is_dir():
            raise FileMissingError(
                f"there is no folder {_shown(path.parent)} to hold {one_line(path.name)}"
            )
        raise FileMissingError(f"there is no file {_shown(path)}{_near(path)}")
    return path


def read_text(path: Path) -> str:
    """Return the text of a prompt or template file."""
    require_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise FileMissingError(
            f"{_shown(path)} cannot be read ({error.strerror}); check its permissions"
        ) from error
    return decode_text(data, _shown(path))


def decode_text(data: bytes, source: str) -> str:
    """Return UTF-8 bytes as text; raises ModelError naming `source` for others, or too many."""
    if len(data) > MAX_TEXT_BYTES:
        raise ModelError(
            f"{source} holds more than {MAX_TEXT_BYTES // 2**20} MiB of text, more than any context"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{source} is not UTF-8 text (byte {error.start + 1}); convert it first"
        ) from error


def _near(path: Path) -> str:
    names = _names(path.parent)
    found = difflib.get_close_matches(path.name, names, 3, cutoff=0.5)
    if found:
        return f". Did you mean {' or '.join(_shown(path.parent / name) for name in found)}?"
    return _files_in(path.parent) or "; check the path"


def _files_in(folder: Path) -> str:
    models = [name for name in _names(folder) if name.endswith(".gguf")]
    if not models:
        return "; name a file"
    more = f" and {len(models) - 3} more" if len(models) > 3 else ""
    return f"; the GGUF files there are {', '.join(map(one_line, models[:3]))}{more}"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError:
        return []


def _shown(path: Path) -> str:
    return one_line(str(path), 4096)
