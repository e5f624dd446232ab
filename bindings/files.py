"""Files: written whole or not at all, opened without waiting, and kept by specrun for itself."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from specrun.bindings.errors import FileMissingError, MalformedFileError, OptionError, SpecrunError

# == Files that are written whole or not at all ====================================================
#
# `atomic_path` writes aside under a hidden name and renames. `unnamed_path` uses files that have no
# name until they are whole (Linux: O_TMPFILE), so that even a killed process leaves nothing behind;
# elsewhere, and on file systems that cannot, it is `atomic_path`. Files that can be made again are
# in `cache_folder`, others in `state_folder`.


_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file in the same folder, which becomes `path` at a good end.

    The file is then synced, renamed over `path`, and the folder synced. On any exception,
    KeyboardInterrupt too, it is removed and an existing `path` stays as it was.

    Raises OptionError if `path` exists and `force` is not given; FileMissingError if its folder
    does not exist; SpecrunError if the disk is full or the folder cannot be written.
    """
    target = Path(path)
    check_target(target, force=force)
    aside = _aside(target)
    with _full_disk_named(target):
        try:
            _create(aside, target)
            yield aside
            _sync_file(aside)
            check_target(target, force=force)
            aside.replace(target)
            sync_folder(target.parent)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def unnamed_path(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """Yield a path to open and write; its content becomes the file `path` at a good end.

    The path may be opened by this process only, and not renamed or removed. Otherwise as
    `atomic_path`, with the same errors.
    """
    target = Path(path)
    check_target(target, force=force)
    with _full_disk_named(target):
        descriptor = _open_unnamed(target)
        if descriptor is None:
            with atomic_path(target, force=force) as aside:
                yield aside
            return
        try:
            yield Path(f"/proc/self/fd/{descriptor}")
            os.fsync(descriptor)
            check_target(target, force=force)
            _give_name(descriptor, target, force=force)
            sync_folder(target.parent)
        finally:
            os.close(descriptor)


@contextmanager
def _full_disk_named(target: Path) -> Iterator[None]:
    """Raise SpecrunError in the place of an OSError for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        problem = f"the disk is full: {target} was not written; free some space"
        raise SpecrunError(problem) from error


def check_target(target: Path, *, force: bool = False) -> None:
    """Raise unless `target` can be written: its folder exists, and no such file, unless `force`."""
    if not target.parent.is_dir():
        place = f"there is no folder {target.parent} to write {target.name} into"
        raise FileMissingError(f"{place}; create it first")
    if target.is_dir():
        raise OptionError(f"{target} is a folder; name the file to write")
    if target.exists() and not target.is_file():  # it would be replaced, were it a device
        raise OptionError(f"{target} is not a regular file; name a file to write")
    if not force and os.path.lexists(target):
        advice = "choose another name, or overwrite it with --force"
        raise OptionError(f"{target} already exists; {advice}")


def require_writable(target: Path) -> None:
    """Raise SpecrunError unless files can be made in the folder of `target`: before long work."""
    aside = _aside(target)
    try:
        _create(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def require_free_space(folder: str | os.PathLike[str], n_bytes: int) -> None:
    """Raise SpecrunError unless the disk of `folder` has at least `n_bytes` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        needed = f"{n_bytes / 1e6:,.1f} MB are needed in {os.fspath(folder)}"
        there = f"{free / 1e6:,.1f} MB are free"
        raise SpecrunError(f"{needed} and {there}: free some space, or write elsewhere")


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk."""
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(target: Path) -> Path:
    # The random part cannot be guessed, so nobody can have put a link in its place.
    return target.with_name(f".{target.name[:40]}.{os.urandom(8).hex()}.partial")


def _create(aside: Path, target: Path) -> None:
    # O_EXCL follows no link and opens nothing that is already there; the umask limits the mode.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    try:
        os.close(os.open(aside, flags, 0o666))
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise _unwritable(target, error) from error


def _unwritable(target: Path, error: OSError) -> SpecrunError:
    return SpecrunError(f"{target} cannot be written ({error.strerror}); choose another folder")


def _sync_file(aside: Path) -> None:
    if not stat.S_ISREG(aside.lstat().st_mode):
        problem = f"{aside} was replaced by something that is not a file while it was written"
        raise SpecrunError(problem)
    # Writable, because Windows cannot sync a file that was opened to read.
    with aside.open("r+b") as file:
        os.fsync(file.fileno())


def _open_unnamed(target: Path) -> int | None:
    """Return a file without a name in the folder of `target`, None if that is not supported."""
    kind = getattr(os, "O_TMPFILE", None)
    if kind is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(target.parent, kind | os.O_RDWR, 0o666)
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise _unwritable(target, error) from error
        if error.errno in _FULL:
            raise
        return None


def _give_name(descriptor: int, target: Path, *, force: bool) -> None:
    if not force:
        try:
            _link(descriptor, target)
        except FileExistsError:
            check_target(target)  # raises: it appeared meanwhile
            raise
        return
    # Only a rename replaces an existing file in one step.
    aside = _aside(target)
    try:
        _link(descriptor, aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def _link(descriptor: int, name: Path) -> None:
    # With folders' descriptors Python takes the call that follows the link in /proc.
    folder = os.open(name.parent, os.O_RDONLY)
    source = f"/proc/self/fd/{descriptor}"
    try:
        os.link(source, name.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def state_folder() -> Path:
    """Return specrun's folder for results of the user's own work: they cannot be made again."""
    return _own_folder("XDG_STATE_HOME", Path(".local", "state"))


def cache_folder() -> Path:
    """Return specrun's folder in the user's cache directory."""
    mac = sys.platform == "darwin"
    return _own_folder("XDG_CACHE_HOME", Path("Library", "Caches") if mac else Path(".cache"))


def _own_folder(variable: str, below_home: Path) -> Path:
    base = Path.home() / below_home
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    # The XDG specification ignores relative paths.
    given = Path(os.environ.get(variable, ""))
    return (given if given.is_absolute() else base) / "specrun"


# == Regular files: a named pipe in their place would block without end ============================


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read its bytes.

    Raises `MalformedFileError` for a named pipe, a device or a socket, and the errors of `open`.
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


# == Files that specrun keeps for itself: cost curves, plans, profiles, learnt tokens ==============
#
# No user named them, so none of them may end a command: one that is damaged, or made for something
# else, is as if it were not there, and a warning names it.


logger = logging.getLogger("specrun.kept")
"""Receives warnings that no caller takes; the command line shows them."""

Warn = Callable[[str], None]
_Content = TypeVar("_Content")
_MOST_BYTES = 1 << 20
DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(RecursionError, SpecrunError),
)
"""Errors of parsing damaged content, also content nested deeper than a parser can follow."""

_warned: set[str] = set()


class NotForThisError(Exception):
    """A kept file is whole, and was made for something else, which the message names."""


def read_kept(
    path: Path,
    parse: Callable[[bytes], _Content],
    *,
    what: str,
    advice: str,
    warn: Warn | None = None,
    most: int = _MOST_BYTES,
) -> _Content | None:
    """Return `parse` of a file's bytes; None without the file, or if it is damaged.

    `parse` may raise any error of damaged content, or NotForThisError. Then `warn`
    (None: the log, once for each sentence) gets a sentence: that `what` was ignored, why, and the
    `advice`. So it is for a path that is no file, cannot be read, or has more than `most` bytes.
    """
    try:
        return parse(_bytes_of(path, most))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (NotForThisError, FileMissingError, MalformedFileError) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or path} cannot be read ({error.strerror or error})"
    except DAMAGE:
        problem = f"{path} is damaged"
    sentence = f"{what} was ignored: {problem}; {advice}"
    # Damaged content may hold half a character, which no terminal can show.
    (warn or _log_once)(sentence.encode("utf-8", "backslashreplace").decode())
    return None


def _bytes_of(path: Path, most: int) -> bytes:
    with open_regular(path) as file:
        # One byte more than allowed shows that a file is too large without reading it all.
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return data


def _log_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; raises ValueError, TypeError or RecursionError for others.

    NaN and infinities, which Python would take, are no JSON.
    """
    value = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    if not isinstance(value, dict):
        raise TypeError(f"the outermost value is {type(value).__name__}, not an object")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def count_in(value: object, least: int = 0, most: int = 2**31 - 1) -> int:
    """Return a whole number of a kept file; raises TypeError or ValueError."""
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is no whole number")
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return value


def text_in(value: object) -> str:
    """Return a text of a kept file; raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def list_in(value: object) -> list[Any]:
    """Return a list of a kept file; raises TypeError: a text or a mapping has elements, too."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    return value
