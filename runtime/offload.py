"""GPU offload (-ngl): layers on the GPU, as asked or as many as its free memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specrun.bindings.devices import devices, supports_gpu_offload
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header

LayerCount = int | Literal["auto", "all"]
# Of the free memory: the rest is for the KV cache, compute buffers and the display.
_SHARE_FOR_WEIGHTS = 0.75


def parse_layer_count(text: str) -> LayerCount:
    """Return the value of -ngl: a number, "auto" or "all"."""
    if text == "auto":
        return "auto"
    if text == "all":
        return "all"
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"GPU layers is {text!r}: give a number, auto or all") from None


def resolve_gpu_layers(wanted: LayerCount, path: Path) -> int:
    """Return llama.cpp's n_gpu_layers (-1: all) for a file.

    "auto" gives every layer if the weights fit into three quarters of the GPUs' free memory,
    otherwise the share that fits; 0 without a GPU.
    """
    if wanted == "all":
        return -1
    if wanted != "auto":
        if wanted < -1:
            raise OptionError(f"GPU layers is {wanted}: give -1 (all), 0 (none) or a count")
        return wanted
    if not supports_gpu_offload():
        return 0
    free = sum(device.memory_free for device in devices() if device.kind in ("gpu", "igpu"))
    header = read_header(path)
    weights = sum(tensor.n_bytes for tensor in header.tensors)
    budget = int(free * _SHARE_FOR_WEIGHTS)
    if weights <= budget:
        return -1
    layers = header.metadata.get(f"{header.architecture}.block_count")
    return budget * layers // weights if isinstance(layers, int) else 0
