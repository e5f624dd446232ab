"""The shape of a model as memory sees it, from its GGUF headers alone: layers, heads, states.

It follows llama.cpp's `llama_hparams` (0c1e570): which layers keep keys and values, how many
numbers of each for a token, and which keep a recurrent state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.gguf import ArrayValue, GGUFHeader, TensorInfo, read_header
from specrun.bindings.models.model import rope_factor
from specrun.bindings.models.nextn import read_nextn, split_headers

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
