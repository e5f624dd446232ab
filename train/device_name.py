"""What a device is called, for reports and model cards."""

from __future__ import annotations

import torch

__all__ = ["device_name"]


def device_name(device: torch.device) -> str:
    """Return the name of the very GPU that computes, "CPU" for the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
