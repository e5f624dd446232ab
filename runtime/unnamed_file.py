"""Files that have no name until they are whole: even a process that is killed leaves nothing behind.

Linux makes such files (O_TMPFILE) and names them at the end, in one step. Elsewhere, and on file systems that cannot,
they are written aside under a hidden name (`atomic.atomic_path`).
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.bindings.errors import SpecrunError
from specrun.runtime.atomic import atomic_path, check_target, sync_folder

__all__ = ["unnamed_path"]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def unnamed_path(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """Yield a path to open and write, whose content becomes the file `path` when the block ends well.

    The path may be opened by this process only, and not renamed or removed. Otherwise as `atomic_path`, with the
    same errors.
    """
    target = Path(path)
    check_target(target, force=force)
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
    except OSError as error:
        if error.errno in _FULL:
            raise SpecrunError(f"the disk is full: {target} was not written; free some space") from error
        raise
    finally:
        os.close(descriptor)


def _open_unnamed(target: Path) -> int | None:
    """Return a file without a name in the folder of `target`, None where there are no such files."""
    kind = getattr(os, "O_TMPFILE", None)
    if kind is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(target.parent, kind | os.O_RDWR, 0o666)
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise SpecrunError(f"{target} cannot be written ({error.strerror}); choose another folder") from error
        if error.errno in _FULL:
            raise SpecrunError(f"the disk is full: {target} was not written; free some space") from error
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
    aside = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.partial")
    try:
        _link(descriptor, aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def _link(descriptor: int, name: Path) -> None:
    # A folder's descriptor makes Python use the call that follows the link in /proc; the path itself is absolute.
    folder = os.open(name.parent, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", name.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
