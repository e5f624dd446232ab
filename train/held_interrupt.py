"""Ctrl-C that waits for a moment: for changes that must be made whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_interrupt"]


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Let the block end before Ctrl-C is heard; it is then heard at once, by whoever heard it before.

    Python tells only the main thread of signals: in another there is nothing to hold. Keep the block short, for
    nothing else can stop it.
    """
    before = signal.getsignal(signal.SIGINT)
    # None: a handler that was not set from Python, and could not be put back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
