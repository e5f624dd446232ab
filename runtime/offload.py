"""GPU offload (-ngl): layers on the GPU, as asked or as many as its free memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.machine.placement import current_placement, resolve_placement

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


def resolve_gpu_layers(wanted: LayerCount, path: Path, *, drafts: bool = False) -> int:
    """Return llama.cpp's n_gpu_layers (-1: all) for a file, of a target or of what `drafts`.

    "auto" gives every layer if the weights fit into three quarters of the free memory of the
    devices that are to be used (`placing`), otherwise the share that fits. 0 without a device,
    whatever was asked for.
    """
    placed = resolve_placement(current_placement(drafts=drafts))
    if wanted == "all":
        wanted = -1
    if wanted != "auto":
        if wanted < -1:
            raise OptionError(f"GPU layers is {wanted}: give -1 (all), 0 (none) or a count")
        return placed.layers_offloaded(wanted)
    free = placed.memory_free
    if not free:
        return 0
    header = read_header(path)
    weights = sum(tensor.n_bytes for tensor in header.tensors)
    budget = int(free * _SHARE_FOR_WEIGHTS)
    if weights <= budget:
        return -1
    layers = header.metadata.get(f"{header.architecture}.block_count")
    return budget * layers // weights if isinstance(layers, int) else 0
