"""Graphs of heads on ggml: a decoder layer over a cache, and best tokens by rank."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVarTuple

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.ggml import ComputeDevice, Graph, GraphBuilder, Tensor, TensorStore
from specrun.bindings.ggml.graph import Rope
from specrun.bindings.ggml.tensor import F32, I32, I64
from specrun.bindings.ggml.weights import TargetTensors, device_for_heads, load_tensors
from specrun.bindings.models.model import Model
from specrun.runtime.heads.file import HeadFile
from specrun.runtime.heads.places import write_chain, write_places
from specrun.runtime.heads.states import FloatRows

# == Best tokens by rank, and the reuse of graphs ==================================================
#
# Reading a whole row of logits back from the device costs more than a small head computes. So top-k
# and log-sum-exp are part of a head's graph, and only `ranks` numbers of each row leave the device.
# Whole trees of best tokens go further (`tree_graphs`).
#
# A graph has a fixed number of rows. A few sizes serve all batches: rows are filled up to the next
# one.


MOST_DEPTHS = 64
"""The deepest tree of one graph."""

_CHAIN_WIDTHS = (1, 1, 2, 4, 4, 8, 8, 8, 8)  # by rows; few, as each is a graph of all depths
MOST_CHAIN_ROWS = len(_CHAIN_WIDTHS) - 1
"""The most rows of the text that a tree's graph catches up on before it drafts."""
chain_width = _CHAIN_WIDTHS.__getitem__
"""Returns the number of rows of the tree's graph that catches up on so many."""

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)


def filled_width(n: int) -> int:
    """Return the number of rows of the graph that evaluates n."""
    return n if n > _WIDTHS[-1] else _WIDTHS[bisect_left(_WIDTHS, n)]


class NativeShare:
    """Counts the native `seconds` of a `device` inside its `with` blocks; they do not nest.

    So each of the conversations that share a head has its own native time.
    """

    def __init__(self, device: ComputeDevice) -> None:
        self.seconds = 0.0
        self.device = device
        self._before = 0.0

    def __enter__(self) -> None:
        self._before = self.device.native_seconds

    def __exit__(self, *_: object) -> None:
        self.seconds += self.device.native_seconds - self._before


class HeadWeights:
    """The weights of a file's head on the target's device, those of `names`.

    Close it between its cells and the target.
    """

    def __init__(self, file: HeadFile, names: Sequence[str], target: Model, n_threads: int) -> None:
        self.n_params = file.header.n_parameters
        self.device = ComputeDevice(device_for_heads(target), n_threads=n_threads)
        self._target = TargetTensors(target, self.device)
        self._graphs: dict[tuple[int, ...], Graph] = {}  # that all conversations share
        self._stores: list[TensorStore] = []
        try:
            self._stores.append(load_tensors(file.path, self.device, names))
        except BaseException:
            self.close()
            raise

    @property
    def native_seconds(self) -> float:
        """Time in the graphs of all conversations."""
        return self.device.native_seconds

    def tensors(self, prefix: str = "") -> LayerWeights:
        """Return the file's tensors by their names behind a prefix."""
        return LayerWeights(self._stores[0].find, prefix)

    def _close_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()

    def close(self) -> None:
        """Free graphs, weights and device; calling it again does nothing."""
        self._close_graphs()
        for store in self._stores:
            store.close()
        self._target.close()
        self.device.close()


# -- best tokens by rank ---------------------------------------------------------------------------


@dataclass(slots=True)
class RankedTokens:
    """A head's best tokens after n rows: `tokens` and natural `log_probs`, both [n, ranks]."""

    tokens: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]


def add_ranking(builder: GraphBuilder, logits: Tensor, ranks: int) -> None:
    """Let a graph return the best `ranks` tokens of each row of logits (vocab, n).

    `ranked_tokens` reads them.
    """
    tokens, values = builder.best(logits, ranks)
    builder.output("tokens", tokens)
    total = builder.log_sum_exp(logits, (tokens, values))
    builder.output("log_probs", builder.sub(values, total))


def tokens_by_rank(graph: Graph, n: int) -> npt.NDArray[np.int32]:
    """Return the tokens [n, ranks] of the first n rows of a computed graph, the best first."""
    return graph.peek("tokens")[:n].astype(np.int32)


def ranked_tokens(graph: Graph, n: int) -> RankedTokens:
    """Return the tokens of the first n rows with their log-probabilities, the best first."""
    log_probs = graph.floats("log_probs")[:n].copy()
    return RankedTokens(tokens_by_rank(graph, n), log_probs)


# -- graphs over a cache ---------------------------------------------------------------------------

Key = TypeVarTuple("Key")


class LengthGraphs(Generic[*Key]):
    """Graphs over a cache that are kept to be run again: of the last `n_lengths` numbers of cells.

    `build` makes one when it is first needed, from the number of cells that it reads and the other
    differences of graphs. Each has memory of its own: those of all lengths of a long text would be
    gigabytes, and a text that has outgrown one does not come back to it soon.
    """

    def __init__(self, build: Callable[[int, *Key], Graph], n_lengths: int = 1) -> None:
        self._build, self._n_lengths = build, n_lengths
        self._graphs: dict[tuple[int, *Key], Graph] = {}
        self._lengths: list[int] = []  # the newest last

    def __len__(self) -> int:
        """Return how many graphs are kept."""
        return len(self._graphs)

    def get(self, length: int, *key: *Key) -> Graph:
        """Return the graph that reads `length` cells."""
        graph = self._graphs.get((length, *key))
        if graph is None:
            if length not in self._lengths:
                self._lengths = [*self._lengths, length][-self._n_lengths :]
                for old in [old for old in self._graphs if old[0] not in self._lengths]:
                    self._graphs.pop(old).close()
            graph = self._graphs[length, *key] = self._build(length, *key)
        return graph

    def close(self) -> None:
        """Free the graphs."""
        while self._graphs:
            self._graphs.popitem()[1].close()


# == A Llama decoder layer of a head: attention over a key-value cache in a ggml graph =============
#
# The cache is a table of cells. A graph writes the keys and values of its rows into the given
# cells, then each row attends to the cells its mask shows: that serves a prompt, a chain and a tree
# alike, wherever the rows lie.
#
# Tensors of a layer, after a prefix of the head's: `attn_{q,k,v,output}.weight` and
# `ffn_{gate,up,down}.weight`, each with an optional `.bias`, `attn_{q,k}_norm.weight` (head size,
# optional), `ffn_norm.weight`, `rope_freqs.weight` (rotated numbers / 2, optional): divisors of
# the rotary frequencies, as in Llama 3.1. Shapes are in ggml's order, the fastest dimension first.


Array = npt.NDArray[Any]

_STEP = 256  # attention reads the cache in steps of this size, so that few graphs serve all lengths
_MASKED = float("-inf")
_MOST_NEW = 16  # cells of text that a mask gets from one made before


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Heads of an attention layer: `n_heads` of queries share `n_kv_heads` of keys and values."""

    n_heads: int
    n_kv_heads: int
    head_size: int
    rope: Rope

    @property
    def size(self) -> int:
        """Numbers of all heads of one row."""
        return self.n_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Numbers of one row's keys."""
        return self.n_kv_heads * self.head_size


class KeyValueCache:
    """One conversation's keys and values of up to `n_cells` rows, rounded up, in F32.

    Each of `n_layers` has its own. One more cell, `spare`, is where rows write that only fill up a
    graph. Close it before the device.
    """

    def __init__(
        self, device: ComputeDevice, sizes: AttentionSizes, n_cells: int, n_layers: int = 1
    ) -> None:
        self.sizes = sizes
        self.n_cells = -(-n_cells // _STEP) * _STEP
        self.spare = self.n_cells
        shape = ("F32", (sizes.kv_size, self.n_cells + 1))
        parts = ("keys", "values")
        self._names = [f"{part}{layer}" for layer in range(n_layers) for part in parts]
        self._tensors = TensorStore(device, dict.fromkeys(self._names, shape))

    def length(self, used: int) -> int:
        """Return how many cells a graph reads so that it sees the first `used` of them."""
        # At most a quarter too many, or a step: a long text is not to need new graphs every few
        # rounds.
        step = max(_STEP, 1 << max(0, used.bit_length() - 3))
        return min(-(-used // step) * step, self.n_cells)

    def places(self, builder: GraphBuilder, n: int, length: int) -> Places:
        """Return inputs for the positions and cells of n rows; `fill_places` fills them."""
        return Places(
            self,
            builder.input("positions", I32, n),
            builder.input("cells", I64, n),
            builder.input("mask", F32, length, n, kept=True),
        )

    def attend(
        self,
        builder: GraphBuilder,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        places: Places,
        factors: Tensor | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(d) + mask) v of all heads, (size, n), for n rows at `places`.

        `query` is (size, n), `key` and `value` (kv_size, n), not rotated yet; `factors` divide the
        rope frequencies. The keys and values are those of `layer`.
        """
        sizes, d, n, length = self.sizes, self.sizes.head_size, query.shape[1], places.length

        def rotated(rows: Tensor, heads: int) -> Tensor:
            by_head = builder.reshape(rows, d, heads, n)
            return builder.rope(by_head, places.positions, sizes.rope, factors)

        def cached(name: str, rows: Tensor) -> Tensor:
            # Read from the write's own result: only that makes ggml write before it reads.
            cells = Tensor(self._tensors[f"{name}{layer}"])
            written = builder.set_rows(cells, rows, places.cells)
            builder.keep(written)
            return builder.reshape(builder.rows(written, 0, length), d, sizes.n_kv_heads, length)

        keys = cached("keys", builder.reshape(rotated(key, sizes.n_kv_heads), sizes.kv_size, n))
        values = cached("values", value)
        query = builder.permute(rotated(query, sizes.n_heads), 0, 2, 1, 3)
        # permute only changes strides: heads become the third axis, and ggml repeats the key-value
        # heads over the query heads (grouped-query attention).
        scores = builder.mul_mat(builder.permute(keys, 0, 2, 1, 3), query)
        weights = builder.soft_max(scores, places.mask, 1.0 / math.sqrt(d))
        # mul_mat contracts the fastest axis of both, so cells must be
        # that axis of the values, and stored as such.
        by_cell = builder.contiguous(builder.permute(values, 1, 2, 0, 3))
        mixed = builder.permute(builder.mul_mat(by_cell, weights), 0, 2, 1, 3)
        return builder.reshape(builder.contiguous(mixed), sizes.size, n)

    def drop(self, n: int) -> None:
        """Forget the first n cells; those behind move to their places."""
        for name in self._names:
            rows = self._tensors.read(name, np.float32)
            self._tensors.write(name, rows[n * self.sizes.kv_size :])

    def copy(self, other: KeyValueCache, n: int) -> None:
        """Copy the first n cells of another conversation of the same head."""
        for name in self._names:
            rows = other._tensors.read(name, np.float32)
            self._tensors.write(name, rows[: n * self.sizes.kv_size])

    def close(self) -> None:
        """Free the cells."""
        self._tensors.close()


RowPlaces = tuple[Sequence[int], Sequence[int], int, npt.NDArray[np.bool_]]
"""Where n rows stand: positions, cells, how many of the first cells all of them see, and which of
the cells from there on each sees, its own among them, [n, m], contiguous."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where n rows of a graph stand: in which cache, at which positions (n), in which cells (n).

    `mask`, (length, n), holds the cells that they see.
    """

    cache: KeyValueCache
    positions: Tensor
    cells: Tensor
    mask: Tensor

    @property
    def length(self) -> int:
        """How many cells are read."""
        return self.mask.shape[0]

    def part(self, builder: GraphBuilder, first: int, count: int) -> Places:
        """Return the places of `count` rows from `first` on."""
        return Places(
            self.cache,
            builder.columns(self.positions, first, count),
            builder.columns(self.cells, first, count),
            builder.rows(self.mask, first, count),
        )


def mask_below(
    builder: GraphBuilder, above: Tensor, parents: Tensor, own: Tensor, zeros: Tensor
) -> Tensor:
    """Return the mask (length, n) of rows that see the cells of a row above, and one more.

    `above` is the mask of the rows above, of which `parents`, I32 (n), names each row's. `own`, I64
    (n), are the places of the cells in the new mask, seen as one row; `zeros` is F32 (1, n).
    """
    length, n = above.shape[0], parents.shape[0]
    copied = builder.reshape(builder.get_rows(above, parents), 1, length * n)
    return builder.reshape(builder.set_rows(copied, zeros, own), length, n)


def fill_places(
    graph: Graph, tokens: Sequence[int], given: FloatRows | None, places: RowPlaces, spare: int
) -> None:
    """Fill a graph's inputs with n tokens and their rows, if any: see `write_places`."""
    at, own, seen, sees = places
    graph.filled = None  # the next chain's mask is not this one's and a few columns
    cells = graph.cells
    into = None if given is None else cells["rows"]
    four = cells["positions"], cells["cells"], cells["mask"], cells["tokens"]
    write_places(*four, into, given, at, own, tokens, seen, sees, spare)


def fill_chain(graph: Graph, given: FloatRows, position: int, count: int, spare: int) -> None:
    """Fill a graph's inputs with rows [n, width], a chain: see `write_chain`."""
    seen, graph.filled = graph.filled, None  # an interrupt leaves unknown cells
    cells = graph.cells
    four = cells["positions"], cells["cells"], cells["mask"], cells["rows"]
    write_chain(*four, given, position, count, -1 if seen is None else seen, spare)
    graph.filled = count


class LayerWeights:
    """A layer's tensors by the names above, which `find` finds by the whole ones, or does not."""

    def __init__(self, find: Callable[[str], Tensor | None], prefix: str) -> None:
        self._find, self._prefix = find, prefix

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.get(name)
        if tensor is None:
            raise KeyError(self._prefix + name)
        return tensor

    def get(self, name: str) -> Tensor | None:
        """Return an optional tensor, None if there is none."""
        return self._find(self._prefix + name)


def layer_attention(file: HeadFile) -> AttentionSizes:
    """Return the attention that a file's metadata describe under llama.cpp's names.

    Rotary pairs are the halves of a head, as in Hugging Face's checkpoints. Raises
    MalformedFileError for sizes that contradict each other.
    """
    hidden = file.size("embedding_length")
    heads, kv = file.size("attention.head_count"), file.size("attention.head_count_kv")
    # The rotation takes pairs of a head, so heads of odd size have none.
    if hidden % heads or heads % kv or (hidden // heads) % 2:
        raise MalformedFileError(
            f"{file.path} has {heads} heads and {kv} key-value heads for hidden states of "
            f"{hidden}: convert it again"
        )
    base, factor = file.number("rope.freq_base", 10000.0), file.number("rope.scaling.factor", 1.0)
    # freq_scale multiplies positions; linear scaling divides them by the factor.
    rope = Rope(hidden // heads, freq_base=base, freq_scale=1.0 / factor, neox=True)
    return AttentionSizes(heads, kv, hidden // heads, rope)


def layer_tensor_names(
    file: HeadFile,
    prefix: str,
    attention: AttentionSizes,
    *,
    hidden: int,
    reads: int,
    norms: Sequence[str] = ("ffn_norm",),
) -> list[str]:
    """Return the layer's tensors in the file, checked.

    Its states have `hidden` numbers, and the attention's inputs `reads`.
    """
    wide = file.size("feed_forward_length")
    matrices = {
        "attn_q": (reads, attention.size),
        "attn_k": (reads, attention.kv_size),
        "attn_v": (reads, attention.kv_size),
        "attn_output": (attention.size, hidden),
        "ffn_gate": (hidden, wide),
        "ffn_up": (hidden, wide),
        "ffn_down": (wide, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    shapes |= {f"{name}.weight": shape for name, shape in matrices.items()}
    optional: dict[str, tuple[int, ...]] = {f"{n}.bias": s[1:] for n, s in matrices.items()}
    optional |= {f"attn_{part}_norm.weight": (attention.head_size,) for part in "qk"}
    optional["rope_freqs.weight"] = (attention.rope.n_dims // 2,)
    shapes |= {name: shape for name, shape in optional.items() if prefix + name in file}
    return [file.require(prefix + name, shape) for name, shape in shapes.items()]


def decoder_layer(
    builder: GraphBuilder,
    weights: LayerWeights,
    x: Tensor,
    residual: Tensor,
    places: Places,
    norm_eps: float,
    factors: Tensor | None = None,
    layer: int = 0,
) -> Tensor:
    """Return y + mlp(norm(y)) with y = residual + attention(x), for rows (hidden, n).

    mlp(x) = down(silu(gate x) * up x). The rows' keys and values go to their places in a cache, to
    those of `layer`; `factors` divide the rotary frequencies.
    """

    def linear(name: str, rows: Tensor) -> Tensor:
        product, bias = (
            builder.mul_mat(weights[f"{name}.weight"], rows),
            weights.get(f"{name}.bias"),
        )
        return product if bias is None else builder.add(product, bias)

    def projected(name: str) -> Tensor:
        found, norm = linear(f"attn_{name}", x), weights.get(f"attn_{name}_norm.weight")
        if norm is None:
            return found
        size, n = found.shape[0], found.shape[1]
        by_head = builder.reshape(found, norm.shape[0], size // norm.shape[0], n)
        return builder.reshape(builder.rms_norm(by_head, norm, norm_eps), size, n)

    q, k, v = map(projected, "qkv")
    mixed = places.cache.attend(builder, q, k, v, places, factors, layer)
    y = builder.add(residual, linear("attn_output", mixed))
    normed = builder.rms_norm(y, weights["ffn_norm.weight"], norm_eps)
    gated = builder.swiglu(linear("ffn_gate", normed), linear("ffn_up", normed))
    return builder.add(y, linear("ffn_down", gated))
