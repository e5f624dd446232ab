"""Memory and faults: estimates before the first step, and the errors that end a training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from specrun.bindings.errors import OutOfMemoryError, SpecrunError
from specrun.bindings.machine.devices import available_memory

# == Estimates of memory ===========================================================================


_GIB = 2**30
_SLACK = 1.15  # the losses of allocators


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes needed, by purpose; `remedies` are advice by the same names to make a part smaller."""

    parts: Mapping[str, int]
    remedies: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All bytes, with the losses of allocators."""
        return int(sum(self.parts.values()) * _SLACK)

    def remedy(self, free: int) -> str:
        """Return advice about the largest parts, until the others fit into `free`."""
        found: list[str] = []
        left = self.total
        for name, size in sorted(self.parts.items(), key=lambda part: -part[1]):
            if left <= free:
                break
            left -= int(size * _SLACK)
            found += [self.remedies[name]] if name in self.remedies and size else []
        return "; ".join(dict.fromkeys(found))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in self.parts.items() if size)
        return f"{self.total / _GIB:.2f} GiB ({parts})"


def trained_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters; trained ones count with gradient and AdamW's averages."""
    return sum(
        parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)
        for parameter in module.parameters()
    )


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be had on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def require_memory(need: MemoryNeed, device: torch.device, free: int | None = None) -> None:
    """Raise OutOfMemoryError with both numbers and a remedy unless `need` is free."""
    free = free_memory(device) if free is None else free
    if need.total > free:
        where = f"on {device}" if device.type != "cpu" else "of RAM"
        what = need.remedy(free) or "use a smaller model"
        raise OutOfMemoryError(
            f"training needs about {need} {where} and {free / _GIB:.2f} GiB are free: {what}"
        )


# == Faults that end a training early ==============================================================
#
# `held_interrupt` lets Ctrl-C wait for a moment, for changes that must be made whole.


ANEW = "train anew, with --force or into another folder, with a lower"
"""The beginning of advice after a fault."""
# Texts of a plain RuntimeError of torch: the CPU's allocator, the system, cuBLAS, Apple's GPUs.
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "out of memory",
)


def is_allocation_failure(error: BaseException) -> bool:
    """Return whether an exception means that there was no memory, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _NO_MEMORY)


def not_a_number(what: str, step: int, value: float, kept: str) -> SpecrunError:
    """Return the error of a loss or gradient from which nothing can be learnt."""
    return SpecrunError(
        f"the {what} at step {step} is {value}, not a number to learn from: training stopped and "
        f"{kept}; {ANEW} --learning-rate (a resumed run keeps its own)"
    )


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends; its handler then receives it at once.

    Only Python's main thread receives signals: in another there is nothing to hold. Keep the
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
