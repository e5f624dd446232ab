"""How fast this machine copies memory: the measure that evaluations of heads are held against."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["CopyProbe"]

_BYTES = 1 << 28  # far more than any cache


class CopyProbe:
    """Copies one large array into another with numpy, each of `n_threads` threads its own part.

    The bandwidth counts the bytes that are copied, each once. As every byte read is also written, memory that is only
    read, like a head's weights, can be faster than that.
    """

    def __init__(self, n_threads: int, n_bytes: int = _BYTES) -> None:
        self.n_bytes = n_bytes
        self._source = np.ones(n_bytes, np.uint8)
        self._copy = np.zeros(n_bytes, np.uint8)  # written once, so that its pages are there
        step = -(-n_bytes // n_threads)
        self._parts = [slice(start, start + step) for start in range(0, n_bytes, step)]
        self._pool = ThreadPoolExecutor(len(self._parts))

    def measure(self) -> float:
        """Return the bytes copied per second, by one copy of the whole array."""
        started = time.perf_counter()
        list(self._pool.map(self._copy_part, self._parts))
        return self.n_bytes / (time.perf_counter() - started)

    def _copy_part(self, part: slice) -> None:
        np.copyto(self._copy[part], self._source[part])

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
