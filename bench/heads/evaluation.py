"""One thing to time: an evaluation of a head, and the bytes that it has to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Evaluation"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What it is, what it must read, how to run it; `native` is the time in its graphs so far."""

    head: str
    width: int
    n_bytes: int
    run: Callable[[], object]
    native: Callable[[], float]
