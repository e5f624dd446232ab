"""Faults that end a training early: a loss that is not a number, and too little memory.

`held_interrupt` lets Ctrl-C wait for a moment, for changes that must be made whole.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specrun.bindings.errors import OutOfMemoryError, SpecrunError

_ANEW = "train anew, with --force or into another folder, with a lower"
# What torch says in a plain RuntimeError: the CPU's allocator, the system, cuBLAS, Apple's GPUs.
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "out of memory",
)


def is_allocation_failure(error: BaseException) -> bool:
    """Return whether an exception says that there was no memory, on whatever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _NO_MEMORY)


def not_a_number(what: str, step: int, value: float, kept: str) -> SpecrunError:
    """Return the error of a loss or gradient from which nothing can be learnt."""
    return SpecrunError(
        f"the {what} at step {step} is {value}, not a number to learn from: training stopped and "
        f"{kept}; {_ANEW} --learning-rate (a resumed run keeps its own)"
    )


def too_little_memory(step: int, device: torch.device, kept: str) -> OutOfMemoryError:
    """Return the error of a step, or a measure, that found no memory after `step` steps."""
    where = "RAM" if device.type == "cpu" else f"memory of {device}"
    return OutOfMemoryError(
        f"the {where} does not suffice after step {step}: training stopped and {kept}; "
        f"{_ANEW} --batch-tokens or --max-length (a resumed run keeps its own, and needs more "
        "memory free)"
    )


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Let the block end before Ctrl-C is heard; its handler then hears it at once.

    Python tells only the main thread of signals: in another there is nothing to hold. Keep the
    block short, for nothing else can stop it.
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
