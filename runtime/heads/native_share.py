"""The part of a head's native time that one of the conversations which share the head caused."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["NativeShare"]


class NativeShare:
    """Counts what passes of `total`, in seconds, inside its `with` blocks; they do not nest."""

    def __init__(self, total: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._total = total
        self._before = 0.0

    def __enter__(self) -> None:
        self._before = self._total()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._total() - self._before
