"""Ctrl-C in tests, also in those started in the background, where SIGINT is ignored."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hearing_ctrl_c"]


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Let this process hear SIGINT as in the foreground, and every child started meanwhile.

    A child inherits that a signal is ignored, while a handler becomes the default at its exec; and
    Python raises KeyboardInterrupt only where the signal was not ignored when it started.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
