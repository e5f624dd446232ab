"""Bytes of a model by layer, from its header, and the devices that the layers can lie on.

llama.cpp counts everything else (`count`). Its own count on the devices of this machine replaces
these figures before a model is loaded (`fit`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.gguf import ArrayValue, GGUFHeader, TensorInfo, read_header
from specrun.bindings.machine import Device, available_memory
from specrun.bindings.models import NextnBlocks, read_nextn, rope_factor, split_headers

# == The shape of a model ==========================================================================


_BLOCK = re.compile(r"blk\.(\d+)\.")
_KEYS = re.compile(r"blk\.(\d+)\.attn_(k|kv_a_mqa|qkv)\.weight")
_STATES = re.compile(r"blk\.(\d+)\.(ssm_|shortconv|time_mix_)")
_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's layers and tensors; `n_layers` are all blocks, the NextN blocks at the end.

    `keys` are the layers' widths of keys, 0 for a layer without; `states` are 1 for layers with a
    recurrent state. Both are relative: llama.cpp counts the bytes.
    """

    path: Path
    architecture: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_layers: int
    n_nextn: int
    nextn: NextnBlocks
    rope_factor: float
    keys: tuple[int, ...]
    states: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """Read the headers of a model's files; raises as `read_header`."""
        header = read_header(path)
        tensors = tuple(item for part in split_headers(path, header) for item in part.tensors)
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        n_vocab = (
            len(tokens) if isinstance(tokens, ArrayValue) else _count(path, header, "vocab_size", 0)
        )
        n_layers = _count(path, header, "block_count")
        n_sharing = _count(path, header, "attention.shared_kv_layers", 0)
        keys, states = _widths(tensors, n_layers, n_sharing)
        return cls(
            path,
            header.architecture,
            _count(path, header, "embedding_length"),
            n_vocab,
            _count(path, header, "context_length"),
            n_layers,
            min(n_layers, _count(path, header, "nextn_predict_layers", 0)),
            read_nextn(path, header),
            rope_factor(header),
            keys,
            states,
            tensors,
        )

    @property
    def trunk(self) -> range:
        """The layers without NextN blocks; all of them in a file of NextN blocks alone."""
        return range(self.n_layers - self.n_nextn)

    @property
    def blocks(self) -> range:
        """The NextN blocks."""
        return range(self.n_layers - self.n_nextn, self.n_layers)


def _widths(
    tensors: Sequence[TensorInfo], n_layers: int, n_sharing: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `keys` and `states` of all layers; the last `n_sharing` read earlier layers' keys."""
    keys, states = [0] * n_layers, [0] * n_layers
    for tensor in tensors:
        found = _STATES.match(tensor.name)
        if found is not None and int(found[1]) < n_layers:
            states[int(found[1])] = 1
    for tensor in tensors:
        found = _KEYS.match(tensor.name)
        if found is None or int(found[1]) >= n_layers - n_sharing:
            continue
        layer = int(found[1])
        if found[2] != "qkv" or not states[layer]:  # else the projection of a recurrent layer
            keys[layer] = tensor.shape[-1]
    return tuple(keys), tuple(states)


def _count(path: Path, header: GGUFHeader, name: str, default: int | None = None) -> int:
    """Return a whole number of a header by its name without the architecture."""
    value = header.metadata.get(f"{header.architecture}.{name}", default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        problem = f"{path} has {value!r} as {header.architecture}.{name}"
        raise MalformedFileError(f"{problem}: its memory cannot be counted")
    return value


# == Weights by place ==============================================================================
#
# It follows `llama_model_base::load_tensors` (0c1e570): embeddings stay in this machine's memory,
# the output matrix goes last, behind all layers, and a tied model has a second copy of the
# embeddings there.


HOST = -1
"""This machine's own memory; devices are counted from 0."""


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


@dataclass(slots=True)
class Weights:
    """Bytes of weights by place, and the largest matrices of this machine that layers multiply by.

    `computes_here` is whether this machine multiplies by any of its weights.
    """

    by_place: dict[int, int] = field(default_factory=dict)
    largest_layer: int = 0
    largest: int = 0
    """The largest matrix, the output's too."""
    computes_here: bool = False


def weights_by_place(
    model: ModelShape,
    places: Sequence[int],
    overrides: Sequence[tuple[str, int]] = (),
    *,
    load_nextn: bool = False,
) -> Weights:
    """Return the weights at each place; `places` are `layer_places`.

    `overrides` are pairs of a regular expression and a place: a tensor goes to the place of the
    first expression that is found in its name. NextN blocks are loaded only with `load_nextn`.
    """
    compiled = [(re.compile(pattern), place) for pattern, place in overrides]
    found, seen = Weights(), set[tuple[str, int]]()
    for tensor, wanted in _placed(model, places, load_nextn=load_nextn):
        place = next((other for pattern, other in compiled if pattern.search(tensor.name)), wanted)
        if (tensor.name, place) in seen:
            continue
        seen.add((tensor.name, place))
        found.by_place[place] = found.by_place.get(place, 0) + tensor.n_bytes
        if place == HOST and tensor.name != _EMBEDDING:
            found.computes_here = True
            if _BLOCK.match(tensor.name):
                found.largest_layer = max(found.largest_layer, tensor.n_bytes)
            if _BLOCK.match(tensor.name) or tensor.name == _OUTPUT:
                found.largest = max(found.largest, tensor.n_bytes)
    return found


def _placed(
    model: ModelShape, places: Sequence[int], *, load_nextn: bool
) -> Iterator[tuple[TensorInfo, int]]:
    n_loaded = model.n_layers - (0 if load_nextn else model.n_nextn)
    is_tied = all(tensor.name != _OUTPUT for tensor in model.tensors)
    for tensor in model.tensors:
        block = _BLOCK.match(tensor.name)
        if block is not None:
            if int(block[1]) < n_loaded:
                yield tensor, places[int(block[1])]
            continue
        yield tensor, HOST if tensor.name.startswith(_INPUT) else places[-1]
        if is_tied and tensor.name == _EMBEDDING and places[-1] != HOST:
            yield tensor, places[-1]


# == Devices of a memory plan: free memory, and the margin that a plan leaves ======================
#
# A device is one of this machine, or a card of a given size that need not exist: `card` counts as
# ggml's CUDA backend would.


_MOST_MARGIN = 1 << 30  # llama.cpp's own (-fitt 1024)
_MARGIN_SHARE = 8
# Backends made of ggml's CUDA sources, and those that never compute with weights of this machine's
# memory.
_AS_CUDA = ("CUDA", "ROCm", "MUSA")
_STAY = ("RPC", "MTL", "Metal")


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """A device with its free memory in bytes, of which a plan leaves `margin` free.

    `takes_weights`: it computes long prompts with weights that lie in this machine's memory, for
    which it needs room for the largest of them. `widens_cells`: its flash attention makes an F16
    copy of a layer's keys and values of other types.
    """

    name: str
    free: int
    takes_weights: bool = False
    widens_cells: bool = False
    kept: int = 0
    """More bytes that a plan leaves free: the error of an earlier plan."""

    @property
    def margin(self) -> int:
        """Bytes for the display, the driver and the errors of a plan: 1 GiB, at most an eighth.

        An 8 GiB card keeps 1 GiB.
        """
        return min(_MOST_MARGIN, self.free // _MARGIN_SHARE)

    @property
    def budget(self) -> int:
        """Bytes that a plan may use."""
        return self.free - self.margin - self.kept


def card(n_bytes: int) -> MemoryDevice:
    """Return a graphics card with so much memory, none of it in use."""
    return MemoryDevice("the card", n_bytes, takes_weights=True, widens_cells=True)


def memory_device(device: Device) -> MemoryDevice:
    """Return a device of this machine, with its free memory of now."""
    return MemoryDevice(
        device.name,
        device.memory_free,
        takes_weights=device.backend not in _STAY,
        widens_cells=device.backend in _AS_CUDA,
    )


def this_machine() -> MemoryDevice:
    """Return this machine's own memory, with the bytes that programs may still take."""
    return MemoryDevice("CPU", available_memory())
