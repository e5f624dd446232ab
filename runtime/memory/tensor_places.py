"""Places of tensors: the split of a model's layers over devices, and the bytes on each.

It follows `llama_model_base::load_tensors` and `llama_model_loader::create_tensor` (0c1e570).
Embeddings stay in this machine's memory; the output matrix goes last, behind all layers; tied
models have a second copy of the embeddings where that is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.gguf import TensorInfo
from specrun.bindings.gguf.types import BLOCK_SIZES, stored_bytes
from specrun.runtime.memory.model_shape import ModelShape

HOST = -1
"""This machine's own memory; devices are counted from 0."""

_BLOCK = re.compile(r"blk\.(\d+)\.")
_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")
_OF_EVERY_LAYER = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
_OF_FIRST_LAYER = ("token_embd_norm.", "per_layer_model_proj.", "per_layer_proj_norm.")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
# llama.cpp makes the copy for the output first here, and does not find it again.
_COPIED_WHEN_TIED = ("gemma3n", "gemma4")
# Names that llama.cpp reads a norm of the output from in one family.
_OUTPUT_NORMS = {"lfm2": "token_embd_norm.", "lfm2moe": "token_embd_norm."}


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """How a kind of device stores tensors: `alignment` in bytes, quantized rows padded to numbers.

    `takes_weights` is whether it computes long prompts with weights that lie in this machine's
    memory, for which it needs room for the largest of them; `widens_cells` whether its flash
    attention makes an F16 copy of a layer's keys and values of other types.
    """

    alignment: int = 32
    row_padding: int = 1
    takes_weights: bool = False
    widens_cells: bool = False

    def size(self, shape: Sequence[int], type_name: str) -> int:
        """Return the bytes of a tensor, in ggml's order of dimensions."""
        n_bytes = stored_bytes(shape, type_name)
        block = BLOCK_SIZES[type_name]
        rest = shape[0] % self.row_padding
        if rest and block > 1:
            n_bytes += stored_bytes((self.row_padding - rest,), type_name)
        return self.padded(n_bytes)

    def padded(self, n_bytes: int) -> int:
        """Return so many bytes, rounded up to the alignment."""
        return -(-n_bytes // self.alignment) * self.alignment


PROCESSOR = MemoryRules()
GRAPHICS_CARD = MemoryRules(128, 512, takes_weights=True, widens_cells=True)
"""As in ggml's CUDA backend."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor with its bytes, in the memory of a device (`HOST` or its number)."""

    name: str
    n_bytes: int
    place: int


def layer_places(n_layers: int, n_gpu_layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the places of all layers and, last, of the output matrix.

    `n_gpu_layers` (-1: all) are counted from the output. `shares` are those of the devices, in any
    unit; none: everything stays here. Rounded as in llama.cpp, to 32 bits.
    """
    n = n_layers + 1
    wanted = n if n_gpu_layers < 0 else n_gpu_layers
    first, active = max(n - wanted, 0), min(wanted, n) if shares else 0
    sums = np.cumsum(np.asarray(shares, np.float32), dtype=np.float32)
    points = sums / sums[-1] if len(sums) else sums
    places = []
    for layer in range(n):
        if layer < first or layer - first >= active:
            places.append(HOST)
            continue
        part = np.float32(layer - first) / np.float32(active)
        place = int(np.searchsorted(points, part, side="right"))
        places.append(min(place, len(shares) - 1))
    return tuple(places)


def place_tensors(
    model: ModelShape,
    places: Sequence[int],
    rules: Sequence[MemoryRules],
    overrides: Sequence[tuple[str, int]] = (),
    *,
    load_nextn: bool = False,
) -> list[PlacedTensor]:
    """Return every tensor that is loaded, a copy for each memory that needs it.

    `places` are `layer_places`, `rules` the devices'. `overrides` are pairs of a regular expression
    and a place: tensors whose names the first that is found in them names go there. NextN blocks
    are loaded only if they are asked for.
    """
    compiled = [(re.compile(pattern), place) for pattern, place in overrides]
    known = {tensor.name: tensor for tensor in model.tensors}
    n_loaded = model.n_layers - (0 if load_nextn else model.n_nextn)
    found: dict[tuple[str, int], PlacedTensor] = {}

    def put(tensor: TensorInfo, place: int) -> None:
        for pattern, other in compiled:
            if pattern.search(tensor.name):
                place = other
                break
        rule = PROCESSOR if place == HOST else rules[place]
        n_bytes = rule.size(tensor.shape, tensor.type_name)
        found[tensor.name, place] = PlacedTensor(tensor.name, n_bytes, place)

    for tensor in model.tensors:
        for place in _wanted_places(model, tensor.name, places, n_loaded):
            put(tensor, place)
    is_tied = _OUTPUT not in known and _EMBEDDING in known
    if is_tied:
        put(known[_EMBEDDING], places[-1])
    placed = list(found.values())
    if is_tied and model.architecture in _COPIED_WHEN_TIED and places[-1] == HOST:
        placed.append(found[_EMBEDDING, HOST])
    return placed


def _wanted_places(
    model: ModelShape, name: str, places: Sequence[int], n_loaded: int
) -> Sequence[int]:
    block = _BLOCK.match(name)
    if block is not None:
        layer = int(block[1])
        return [places[layer]] if layer < min(n_loaded, model.n_layers) else []
    if name.startswith(_OUTPUT_NORMS.get(model.architecture, "\0")):
        return [places[-1]]
    if name.startswith(_OF_EVERY_LAYER):
        return sorted(set(places[:n_loaded]))
    if name.startswith(_OF_FIRST_LAYER):
        return [places[0]]
    return [HOST] if name.startswith(_INPUT) else [places[-1]]


def largest_weight(tensors: Sequence[PlacedTensor], *, with_output: bool) -> int:
    """Return the bytes of the largest matrix of this machine's memory that layers multiply by."""
    names = [_OUTPUT] if with_output else []
    return max(
        (
            tensor.n_bytes
            for tensor in tensors
            if tensor.place == HOST and (_BLOCK.match(tensor.name) or tensor.name in names)
        ),
        default=0,
    )
