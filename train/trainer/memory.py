"""Estimates of the memory that a training run needs, checked before its first step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from specrun.bindings.errors import OutOfMemoryError

_GIB = 2**30
_SLACK = 1.15  # what allocators lose


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes needed, by what for; `remedies` say by the same names what makes a part smaller."""

    parts: Mapping[str, int]
    remedies: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All bytes, with what allocators lose."""
        return int(sum(self.parts.values()) * _SLACK)

    def remedy(self, free: int) -> str:
        """Return what to do about the largest parts until the others fit into `free`."""
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
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):  # Windows
            return 1 << 62


def require_memory(
    need: MemoryNeed, device: torch.device, free: int | None = None, *, advice: str = ""
) -> None:
    """Raise OutOfMemoryError with both numbers and a remedy unless `need` fits into what is free.

    `advice` is for needs that name no remedies.
    """
    free = free_memory(device) if free is None else free
    if need.total > free:
        where = f"on {device}" if device.type != "cpu" else "of RAM"
        what = need.remedy(free) or advice or "use a smaller model"
        raise OutOfMemoryError(
            f"training needs about {need} {where} and {free / _GIB:.2f} GiB are free: {what}"
        )
