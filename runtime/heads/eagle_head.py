"""The head of EAGLE-1 and EAGLE-2 (Li et al. 2024) as ggml graphs with a key-value cache of their own.

The head predicts the target's next final hidden state from the one at position j, f_j, and the token after it, t_(j+1):
x = fc [embed(t_(j+1)); f_j] + b, then one Llama layer without an input norm (attention over the pairs before, x + attn;
then x + mlp(norm(x))). The target's own output matrix turns the predicted state into the draft law of t_(j+2).
Reference: SafeAILab/EAGLE, `eagle/model/cnets1.py` and `cnets.py`; HASS checkpoints are of the same form.

The pair (f_j, t_(j+1)) stands at position j. Below the last real pair the head feeds itself its own predictions, one
pair for each node of the draft tree.

Tensors: `eagle.fc.weight` (2h, h), `eagle.fc.bias` (h, optional), those of `decoder_layer` after `eagle.`,
`token_embd.weight` (h, words, optional).
"""

from __future__ import annotations

import os
import time
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
from specrun.runtime.heads.decoder_layer import (
    LayerSizes,
    LayerWeights,
    attention,
    feed_forward,
    layer_sizes,
    layer_tensor_names,
)
from specrun.runtime.heads.graph_sizes import filled_length, filled_width
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.heads.ranked_words import add_ranking, ranked_words

__all__ = ["EagleHead", "EagleRows"]

FloatRows = npt.NDArray[np.float32]

_PREFIX = "eagle."
_MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class EagleRows:
    """What the head says after n pairs: predicted hidden states [n, hidden] and its best words.

    `words` and `log_probs` are [n, ranks], the most likely first; `logits` [n, words] where they were asked for.
    """

    states: FloatRows
    words: npt.NDArray[np.int32]
    log_probs: FloatRows
    logits: FloatRows | None


class EagleHead:
    """The head of a file on the target's device, with room for `n_cells` pairs. `close()` it before the target.

    `ranks` is how many words are named after each pair; `whole_rows` returns all logits, for draws.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        *,
        n_cells: int,
        ranks: int,
        whole_rows: bool = False,
        n_threads: int = 0,
    ) -> None:
        file = HeadFile(path, "eagle")
        file.check_target(target)
        self.sizes = layer_sizes(file)
        words = file.size("vocab_size")
        self.native_seconds = 0.0
        self.n_params = file.header.n_parameters
        self.n_cells = filled_length(n_cells)
        self._spare = self.n_cells  # where pairs that only fill up a graph write
        self._ranks = min(ranks, words)
        self._whole_rows = whole_rows
        names = _tensor_names(file, self.sizes, words)
        self._device = ComputeDevice(gpu=target.n_gpu_layers != 0, n_threads=n_threads)
        self._target = TargetTensors(target, self._device)
        self._stores: list[TensorStore] = []
        self._graphs: dict[tuple[int, int], Graph] = {}
        try:
            self._weights = load_tensors(path, self._device, names)
            self._stores.append(self._weights)
            self._layer = LayerWeights(self._weights, _PREFIX)
            shape = ("F32", (self.sizes.kv_size, self.n_cells + 1))
            self._cache = TensorStore(self._device, {"keys": shape, "values": shape})
            self._stores.append(self._cache)
            own = "token_embd.weight"
            self._embedding = Tensor(self._weights[own]) if own in self._weights else self._target.embedding()
            self._output = self._target.output()
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
        """Evaluate n pairs of a token and the hidden state before it, [n, hidden].

        Keys and values go into `cells` [n]; pair i attends to the cells that `sees` [n, cells in use] marks, its own
        among them.
        """
        n, used = sees.shape
        if used > self.n_cells:
            raise OptionError(f"an EAGLE head with {self.n_cells} cells cannot hold {used} pairs")
        length, width = filled_length(used), filled_width(n)
        graph = self._graphs.get((width, length))
        if graph is None:
            graph = self._graphs[width, length] = self._build(width, length)
        inputs = _filled_up(tokens, states, positions, cells, sees, width, length, self._spare)
        started = time.perf_counter()
        found = graph.run(inputs)
        self.native_seconds += time.perf_counter() - started
        best = ranked_words(found, n)
        return EagleRows(
            _floats(found["states"])[:n],
            best.words,
            best.log_probs,
            _floats(found["logits"])[:n] if self._whole_rows else None,
        )

    def close(self) -> None:
        """Free graphs, cache, weights and device."""
        while self._graphs:
            self._graphs.popitem()[1].close()
        while self._stores:
            self._stores.pop().close()
        self._target.close()
        self._device.close()

    def _build(self, n: int, length: int) -> Graph:
        """Return the graph for n pairs that attend to the first `length` cells."""
        sizes, builder = self.sizes, GraphBuilder(self._device)
        try:
            tokens, states = builder.input("tokens", I32, n), builder.input("states", F32, sizes.hidden, n)
            pair = builder.concat(builder.get_rows(self._embedding, tokens), states)
            x, bias = builder.mul_mat(self._layer["fc.weight"], pair), self._layer.get("fc.bias")
            x = x if bias is None else builder.add(x, bias)
            x = builder.add(x, attention(builder, x, self._layer, self._cache, sizes, length))
            x = builder.add(x, feed_forward(builder, x, self._layer, sizes))
            logits = builder.mul_mat(self._output, x)
            builder.output("states", x)
            add_ranking(builder, logits, self._ranks)
            if self._whole_rows:
                builder.output("logits", logits)
            return builder.build()
        finally:
            builder.close()


def _floats(array: npt.NDArray[np.generic]) -> FloatRows:
    return array.astype(np.float32, copy=False)


def _filled_up(
    tokens: Sequence[int],
    states: FloatRows,
    positions: npt.NDArray[np.int32],
    cells: npt.NDArray[np.int64],
    sees: npt.NDArray[np.bool_],
    width: int,
    length: int,
    spare: int,
) -> dict[str, npt.NDArray[np.generic]]:
    """Return a graph's inputs with pairs that write to a spare cell, and see the first one, after the real ones."""
    n, used = sees.shape
    mask = np.full((width, length), _MASKED, np.float32)
    mask[:n, :used][sees] = 0.0
    mask[n:, 0] = 0.0
    rows = np.zeros((width, states.shape[1]), np.float32)
    rows[:n] = states
    more = width - n
    return {
        "tokens": np.array([*tokens, *[0] * more], np.int32),
        "states": rows,
        "positions": np.concatenate([positions, np.zeros(more, np.int32)]),
        "cells": np.concatenate([cells, np.full(more, spare, np.int64)]),
        "mask": mask,
    }


def _tensor_names(file: HeadFile, sizes: LayerSizes, words: int) -> list[str]:
    """Return all tensors of the file that are used, checked."""
    h = sizes.hidden
    names = [file.require("eagle.fc.weight", (2 * h, h)), *layer_tensor_names(file, _PREFIX, sizes)]
    for name, shape in (("eagle.fc.bias", (h,)), ("token_embd.weight", (h, words))):
        if name in file:
            names.append(file.require(name, shape))
    return names
