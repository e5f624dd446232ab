"""Devices of a memory plan: what is free there, and the margin that a plan leaves.

A device is one that is here, or a card of a given size that is not: `card` counts as ggml's CUDA
backend would.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrun.bindings.machine.devices import Device, device_alignment
from specrun.bindings.machine.host_memory import available_memory
from specrun.runtime.memory.tensor_places import GRAPHICS_CARD, PROCESSOR, MemoryRules

GIB = 1 << 30
_MOST_MARGIN = GIB  # llama.cpp's own (-fitt 1024)
_MARGIN_SHARE = 8
# Backends made of ggml's CUDA sources, and those that never compute with weights of this machine's
# memory.
_AS_CUDA = ("CUDA", "ROCm", "MUSA")
_STAY = ("RPC", "MTL", "Metal")


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """A device with its free memory in bytes, of which a plan leaves `margin` alone."""

    name: str
    free: int
    rules: MemoryRules = PROCESSOR
    kept: int = 0
    """Bytes that a plan leaves alone besides: by how much one before was too small."""

    @property
    def margin(self) -> int:
        """Bytes for the display, the driver and what a plan did not see: 1 GiB, at most an eighth.

        An 8 GiB card keeps 1 GiB.
        """
        return min(_MOST_MARGIN, self.free // _MARGIN_SHARE)

    @property
    def budget(self) -> int:
        """Bytes that a plan may use."""
        return self.free - self.margin - self.kept


def card(n_bytes: int) -> MemoryDevice:
    """Return a graphics card with so much memory, none of it in use."""
    return MemoryDevice("the card", n_bytes, GRAPHICS_CARD)


def memory_device(device: Device) -> MemoryDevice:
    """Return a device that is here, with what is free of it now."""
    as_cuda = device.backend in _AS_CUDA
    rules = MemoryRules(
        device_alignment(device),
        GRAPHICS_CARD.row_padding if as_cuda else 1,
        takes_weights=device.backend not in _STAY,
        widens_cells=as_cuda,
    )
    return MemoryDevice(device.name, device.memory_free, rules)


def this_machine() -> MemoryDevice:
    """Return this machine's own memory, with what programs may still take of it."""
    return MemoryDevice("CPU", available_memory())
