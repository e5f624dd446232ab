"""Files that appear whole or not at all: written under no name or a hidden one, synced, then named.

`atomic_path` writes aside under a hidden name and renames. `unnamed_path` uses files that have no
name until they are whole (Linux: O_TMPFILE), so that even a killed process leaves nothing behind;
elsewhere, and on file systems that cannot, it is `atomic_path`. What can be made again lies in
`cache_folder`, what cannot in `state_folder`.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.bindings.errors import FileMissingError, OptionError, SpecrunError

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
    """Raise SpecrunError in the place of an OSError that says that the disk is full."""
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
    """Raise SpecrunError unless files can be made beside `target`: asked before long work."""
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
    return target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.partial")


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
    """Return a file without a name in the folder of `target`, None where that is not supported."""
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
    """Return specrun's folder for what the user's own work left: it cannot be made again."""
    home = Path.home()
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = home / ".local" / "state"
    # The XDG specification ignores relative paths.
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (given if given.is_absolute() else base) / "specrun"


def cache_folder() -> Path:
    """Return specrun's folder in the user's cache directory."""
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = home / ".cache"
    # The XDG specification ignores relative paths.
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else base) / "specrun"
