"""Brings a file to the disk while it is still being written.

A system that has room keeps gigabytes of written data in memory until the last fsync, which then takes as long as
the disk does while nothing else happens, behind a progress bar that says 100 %.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO

__all__ = ["EarlySync"]

_STRETCH = 128 << 20  # bytes from one sync to the next


class EarlySync:
    """Syncs an open file in a thread of its own, every 128 MiB; a context manager that waits for the last one.

    A sync that fails raises its OSError from the next call of `wrote`, or at the end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specrun-sync")
        self._running: Future[None] | None = None
        self._waiting = 0

    def __enter__(self) -> EarlySync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        if error is None and self._running is not None:
            self._running.result()

    def wrote(self, n_bytes: int) -> None:
        """Count what was written."""
        self._waiting += n_bytes
        if self._waiting < _STRETCH or (self._running is not None and not self._running.done()):
            return
        if self._running is not None:
            self._running.result()
        self._waiting = 0
        self._running = self._pool.submit(_sync, self._descriptor)


def _sync(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)
