"""What EAGLE's heads have in common: one layer over pairs, as ggml graphs with a key-value cache of their own.

The pair (f_j, t_(j+1)) joins a state of the target at position j with the token after it, and stands at position j. The
head predicts the next state, and with an output matrix the draft law of t_(j+2). Below the last real pair it feeds
itself its own predictions, one pair for each node of the draft tree.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32, I32
from specrun.bindings.ggml.graph import Graph, GraphBuilder, Tensor
from specrun.bindings.ggml.target_tensors import TargetTensors
from specrun.bindings.ggml.weights import TensorStore, load_tensors
from specrun.bindings.model import Model
from specrun.runtime.heads.cached_attention import AttentionSizes, KeyValueCache, cache_inputs
from specrun.runtime.heads.head_file import HeadFile

__all__ = ["EagleRows", "FloatRows", "PairHead", "PairSizes"]

FloatRows = npt.NDArray[np.float32]

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)  # few graphs serve all numbers of pairs: others are filled up
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes of a head: its predicted states, the target's features of a pair, the words it knows, its layer."""

    hidden: int
    features: int
    words: int
    feed_forward: int
    norm_eps: float
    attention: AttentionSizes


@dataclass(frozen=True, slots=True)
class EagleRows:
    """What a head says after n pairs: predicted states [n, hidden] and its best words.

    `words` (of the target) and `log_probs` are [n, ranks], the most likely first; `logits` [n, words of the target]
    where they were asked for.
    """

    states: FloatRows
    words: npt.NDArray[np.int32]
    log_probs: FloatRows
    logits: FloatRows | None


class PairHead(ABC):
    """A head on the target's device, with room for `n_cells` pairs. `close()` it before the target.

    `ranks` is how many words are named after each pair; `whole_rows` returns all logits, for draws. `names` are the
    tensors of the file to load, those of the layer beginning with `prefix`; embedding and output matrix are the
    target's where the file has none.
    """

    taps: tuple[int, ...] = ()
    """The layers of the target whose inputs, one after the other, are its features; none: its final hidden state."""

    def __init__(
        self,
        file: HeadFile,
        names: Sequence[str],
        prefix: str,
        sizes: PairSizes,
        target: Model,
        *,
        n_cells: int,
        ranks: int,
        whole_rows: bool,
        n_threads: int,
    ) -> None:
        self.sizes = sizes
        self.native_seconds = 0.0
        self.n_params = file.header.n_parameters
        self._prefix = prefix
        self._ranks = min(ranks, sizes.words)
        self._whole_rows = whole_rows
        self._device = ComputeDevice(gpu=target.n_gpu_layers != 0, n_threads=n_threads)
        self._target = TargetTensors(target, self._device)
        self._stores: list[TensorStore | KeyValueCache] = []
        self._graphs: dict[tuple[bool, int, int], Graph] = {}
        try:
            self._weights = load_tensors(file.path, self._device, names)
            self._stores.append(self._weights)
            self._cache = KeyValueCache(self._device, sizes.attention, n_cells)
            self._stores.append(self._cache)
            self.n_cells = self._cache.n_cells
            self._embedding = self._own(_EMBEDDING) or self._target.embedding()
            self._output = self._own(_OUTPUT) or self._target.output()
        except BaseException:
            self.close()
            raise

    def evaluate(
        self,
        tokens: Sequence[int],
        states: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
    ) -> EagleRows:
        """Evaluate n pairs of a token and the state that the head predicted before it, [n, hidden].

        Keys and values go into `cells` [n]; pair i attends to the cells that `sees` [n, cells in use] marks, its own
        among them.
        """
        return self._evaluate(tokens, states, positions, cells, sees, real=False)

    def evaluate_features(
        self,
        tokens: Sequence[int],
        features: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
    ) -> EagleRows:
        """Evaluate n pairs of a token and the target's features before it, [n, features]; otherwise as `evaluate`."""
        return self._evaluate(tokens, features, positions, cells, sees, real=True)

    def close(self) -> None:
        """Free graphs, cache, weights and device."""
        while self._graphs:
            self._graphs.popitem()[1].close()
        while self._stores:
            self._stores.pop().close()
        self._target.close()
        self._device.close()

    # -- what a kind of head says ----------------------------------------------------------------------------------

    def _fused(self, builder: GraphBuilder, features: Tensor) -> Tensor:
        """Return the states (hidden, n) that taps (features, n) become; asked of heads with taps only."""
        return features

    @abstractmethod
    def _predicted(self, builder: GraphBuilder, words: Tensor, states: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the predicted states (hidden, n) and what the output matrix reads, for pairs of both."""

    def _target_words(self, ranked: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return which words of the target these words of the head are."""
        return ranked

    def _target_rows(self, logits: FloatRows) -> FloatRows:
        """Return logits over the head's words, [n, words], as logits over the target's."""
        return logits

    # -- the parts of a layer --------------------------------------------------------------------------------------

    def _weight(self, name: str) -> Tensor:
        return Tensor(self._weights[f"{self._prefix}{name}"])

    def _own(self, name: str) -> Tensor | None:
        return Tensor(self._weights[name]) if name in self._weights else None

    def _layer(
        self, builder: GraphBuilder, x: Tensor, residual: Tensor, length: int, factors: Tensor | None = None
    ) -> Tensor:
        """Return y + mlp(norm(y)) with y = residual + attention(x)."""
        query, key, value = (self._projected(builder, name, x) for name in "qkv")
        mixed = self._cache.attend(builder, query, key, value, length, factors)
        y = builder.add(residual, builder.mul_mat(self._weight("attn_output.weight"), mixed))
        normed = builder.rms_norm(y, self._weight("ffn_norm.weight"), self.sizes.norm_eps)
        gate, up = (builder.mul_mat(self._weight(f"ffn_{name}.weight"), normed) for name in ("gate", "up"))
        return builder.add(y, builder.mul_mat(self._weight("ffn_down.weight"), builder.swiglu(gate, up)))

    def _projected(self, builder: GraphBuilder, name: str, x: Tensor) -> Tensor:
        linear, bias = builder.mul_mat(self._weight(f"attn_{name}.weight"), x), f"attn_{name}.bias"
        return builder.add(linear, self._weight(bias)) if f"{self._prefix}{bias}" in self._weights else linear

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _evaluate(
        self,
        tokens: Sequence[int],
        states: FloatRows,
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        sees: npt.NDArray[np.bool_],
        *,
        real: bool,
    ) -> EagleRows:
        n, used = sees.shape
        if used > self.n_cells:
            raise OptionError(f"an EAGLE head with {self.n_cells} cells cannot hold {used} pairs")
        width, length = next((one for one in _WIDTHS if one >= n), n), self._cache.length(used)
        graph = self._graph(width, length, real=real)
        inputs = cache_inputs(positions, cells, sees, width, length, self._cache.spare)
        rows = np.zeros((width, states.shape[1]), np.float32)
        rows[:n] = states
        inputs |= {"tokens": np.array([*tokens, *[0] * (width - n)], np.int32), "states": rows}
        started = time.perf_counter()
        found = graph.run(inputs)
        self.native_seconds += time.perf_counter() - started
        values = _floats(found["values"])[:n]
        order = np.argsort(-values, axis=1, kind="stable")
        ranked = np.take_along_axis(found["words"].astype(np.int32, copy=False)[:n], order, 1)
        return EagleRows(
            _floats(found["states"])[:n],
            self._target_words(ranked),
            np.take_along_axis(values, order, 1) - _floats(found["total"])[:n],
            self._target_rows(_floats(found["logits"])[:n]) if self._whole_rows else None,
        )

    def _graph(self, width: int, length: int, *, real: bool) -> Graph:
        """Return the graph for so many pairs that attend to the first `length` cells."""
        fused = real and bool(self.taps)  # without taps one graph serves both
        key = (fused, width, length)
        if key not in self._graphs:
            self._graphs[key] = self._build(width, length, fused=fused)
        return self._graphs[key]

    def _build(self, n: int, length: int, *, fused: bool) -> Graph:
        builder = GraphBuilder(self._device)
        try:
            tokens = builder.input("tokens", I32, n)
            states = builder.input("states", F32, self.sizes.features if fused else self.sizes.hidden, n)
            if fused:
                states = self._fused(builder, states)
            predicted, read = self._predicted(builder, builder.get_rows(self._embedding, tokens), states, length)
            logits = builder.mul_mat(self._output, read)
            best = builder.top_k(logits, self._ranks)
            builder.output("states", predicted)
            builder.output("words", best)
            builder.output("values", builder.pick(logits, best, self._ranks))
            builder.output("total", builder.log_sum_exp(logits))
            if self._whole_rows:
                builder.output("logits", logits)
            return builder.build()
        finally:
            builder.close()


def _floats(array: npt.NDArray[np.generic]) -> FloatRows:
    return array.astype(np.float32, copy=False)
