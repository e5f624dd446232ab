"""Memory by headers alone: a model's shape, its tensors on devices, and the free memory there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.gguf import ArrayValue, GGUFHeader, TensorInfo, read_header
from specrun.bindings.gguf.types import BLOCK_SIZES, stored_bytes
from specrun.bindings.machine.devices import Device, available_memory, device_alignment
from specrun.bindings.models.model import rope_factor
from specrun.bindings.models.nextn import read_nextn, split_headers

# == The shape of a model: layers, heads, states ===================================================
#
# It follows llama.cpp's `llama_hparams` (0c1e570): which layers keep keys and values, how many
# numbers of each for a token, and which keep a recurrent state.


_LATENT = "deepseek2"  # keeps MLA's latent state in the place of keys, and no values
_SHARES_LAST = {"gemma3n": 20}  # layers from here on read the cells of those before
_BOTH = "falcon-h1"  # attention and a recurrent state in every layer
_BY_FEED_FORWARD = ("nemotron_h", "nemotron_h_moe")  # layers of feed-forward alone keep nothing
_BY_INTERVAL = ("qwen3next", "qwen35", "qwen35moe")
_BY_HEADS = ("jamba", "granitehybrid", "lfm2", "lfm2moe", "plamo2", *_BY_FEED_FORWARD)
_RECURRENT = ("mamba", "mamba2")
# Indexers, compressed states, rings and loops over layers: what they keep is asked of llama.cpp.
_OTHERS = """
    arwkv7 bailingmoe3 deepseek32 deepseek4 dflash dots3note gemma4-assistant glm-dsa glm5-next
    graniteswitch hy_v4 kimi-k3 kimi-linear minimax-01 minimax-m3 nanbeige qwen4exp rwkv6
    rwkv6qwen2 rwkv7
"""
UNCOUNTED = frozenset(_OTHERS.split())
"""Architectures whose cells do not follow from a few numbers of the header."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps: numbers of keys and values for a token, and of a state for a sequence.

    `state` are two tensors: of the convolution, and of the recurrence.
    """

    keys: int = 0
    values: int = 0
    state: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's layers and tensors; `layers` are all blocks, `n_nextn` NextN blocks at their end.

    `counted` is whether `layers` says what they keep: not for `UNCOUNTED` architectures.
    """

    path: Path
    architecture: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_nextn: int
    has_nextn: bool
    rope_factor: float
    layers: tuple[LayerShape, ...]
    tensors: tuple[TensorInfo, ...]

    @property
    def n_layers(self) -> int:
        """How many blocks there are, NextN blocks among them."""
        return len(self.layers)

    @property
    def counted(self) -> bool:
        """Whether its cells follow from the header."""
        return self.architecture not in UNCOUNTED

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """Read the headers of a model's files; raises as `read_header`."""
        header = read_header(path)
        values = _Values(path, header)
        n_layers = values.count("block_count")
        tensors = tuple(item for part in split_headers(path, header) for item in part.tensors)
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        n_vocab = len(tokens) if isinstance(tokens, ArrayValue) else values.count("vocab_size", 0)
        return cls(
            path,
            header.architecture,
            values.count("embedding_length"),
            n_vocab,
            values.count("context_length"),
            values.count("nextn_predict_layers", 0),
            read_nextn(path, header).count > 0,
            rope_factor(header),
            _layers(values, header.architecture, n_layers),
            tensors,
        )


class _Values:
    """Whole numbers of a header by their names without the architecture."""

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self._path, self._header = path, header

    def count(self, name: str, default: int | None = None) -> int:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, ArrayValue) and len(value):
            value = max(int(item) for item in self._items(name, value))
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            problem = f"{self._path} has {value!r} as {self._header.architecture}.{name}"
            raise MalformedFileError(f"{problem}: its memory cannot be counted")
        return value

    def each(self, name: str, n: int, default: int | None = None) -> list[int]:
        """Return a number for every layer, of an array or of one number for all."""
        value = self._get(name)
        if not isinstance(value, ArrayValue):
            return [self.count(name, default)] * n
        items = self._items(name, value)
        return [*items, *[0] * n][:n]

    def flags(self, name: str, n: int) -> list[bool] | None:
        value = self._get(name)
        if not isinstance(value, ArrayValue):
            return None
        return [bool(item) for item in [*self._items(name, value), *[0] * n][:n]]

    def _get(self, name: str) -> object:
        return self._header.metadata.get(f"{self._header.architecture}.{name}")

    def _items(self, name: str, value: ArrayValue) -> list[int]:
        items = list(value)
        if not all(isinstance(item, (int, bool)) for item in items):
            problem = f"{self._path} has no whole numbers as {self._header.architecture}.{name}"
            raise MalformedFileError(f"{problem}: its memory cannot be counted")
        return [int(item) for item in items]


def _layers(values: _Values, architecture: str, n: int) -> tuple[LayerShape, ...]:
    n_trunk = n - min(n, values.count("nextn_predict_layers", 0))
    heads = values.each("attention.head_count", n, 0)
    kv_heads = values.each("attention.head_count_kv", n, -1)
    kv_heads = [own if own >= 0 else every for own, every in zip(kv_heads, heads, strict=True)]
    recurrent = _recurrent_layers(values, architecture, kv_heads, n_trunk)
    attends = _attention_layers(values, architecture, recurrent)
    state = _state(values, architecture, n)
    widths = [_head_sizes(values, architecture, heads, windowed) for windowed in (False, True)]
    windows = values.flags("attention.sliding_window_pattern", n) or [False] * n
    found = []
    for layer in range(n):
        keys, numbers = widths[windows[layer]]
        keys, numbers = keys * kv_heads[layer], numbers * kv_heads[layer]
        own = attends[layer]
        kept = state if recurrent[layer] else (0, 0)
        found.append(LayerShape(keys if own else 0, numbers if own else 0, kept))
    return tuple(found)


def _head_sizes(
    values: _Values, architecture: str, heads: Sequence[int], windowed: bool
) -> tuple[int, int]:
    """Return a head's numbers of keys and of values, in layers with a sliding window or without."""
    usual = values.count("embedding_length") // heads[0] if heads and heads[0] else 0
    keys = values.count("attention.key_length", usual)
    numbers = values.count("attention.value_length", usual)
    if windowed:
        keys = values.count("attention.key_length_swa", keys)
        numbers = values.count("attention.value_length_swa", numbers)
    if architecture == _LATENT and values.count("attention.key_length_mla", 0):
        numbers = 0
    return keys, numbers


def _recurrent_layers(
    values: _Values, architecture: str, kv_heads: Sequence[int], n_trunk: int
) -> list[bool]:
    n = len(kv_heads)
    if architecture in _RECURRENT or architecture == _BOTH:
        return [True] * n
    if architecture in _BY_INTERVAL:
        named = values.flags("attention.recurrent_layers", n)
        every = max(1, values.count("full_attention_interval", 4))
        chosen = named or [(layer + 1) % every != 0 for layer in range(n)]
        return [kept and layer < n_trunk for layer, kept in enumerate(chosen)]
    if architecture not in _BY_HEADS:
        return [False] * n
    found = [heads == 0 for heads in kv_heads]
    if architecture in _BY_FEED_FORWARD:
        widths = values.each("feed_forward_length", n, 0)
        found = [kept and not width for kept, width in zip(found, widths, strict=True)]
    return [kept and layer < n_trunk for layer, kept in enumerate(found)]


def _attention_layers(values: _Values, architecture: str, recurrent: Sequence[bool]) -> list[bool]:
    n = len(recurrent)
    if architecture == _BOTH:
        return [True] * n
    if architecture in _BY_FEED_FORWARD:
        widths = values.each("feed_forward_length", n, 0)
        return [not kept and not width for kept, width in zip(recurrent, widths, strict=True)]
    last = _SHARES_LAST.get(architecture, n)
    if architecture == "gemma4":
        last = n - values.count("attention.shared_kv_layers", 0)
    return [not kept and layer < last for layer, kept in enumerate(recurrent)]


def _state(values: _Values, architecture: str, n: int) -> tuple[int, int]:
    """Return the numbers of a recurrent layer's state for one sequence."""
    if architecture in ("lfm2", "lfm2moe"):
        return values.count("embedding_length") * (values.count("shortconv.l_cache", 1) - 1), 0
    kernel, inner = values.count("ssm.conv_kernel", 0), values.count("ssm.inner_size", 0)
    size, groups = values.count("ssm.state_size", 0), values.count("ssm.group_count", 0)
    return max(0, kernel - 1) * (inner + 2 * groups * size), size * inner


# == Places of tensors: the split of a model's layers over devices, and the bytes on each ==========
#
# It follows `llama_model_base::load_tensors` and `llama_model_loader::create_tensor` (0c1e570).
# Embeddings stay in this machine's memory; the output matrix goes last, behind all layers; tied
# models have a second copy of the embeddings where that is.


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


# == Devices of a memory plan: free memory, and the margin that a plan leaves ======================
#
# A device is one that is here, or a card of a given size that is not: `card` counts as ggml's CUDA
# backend would.


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
