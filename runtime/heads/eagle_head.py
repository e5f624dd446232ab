"""The head of EAGLE-1 and EAGLE-2 (Li et al. 2024) as ggml graphs with a key-value cache of their own.

The head predicts the target's next final hidden state from the one at position j, f_j, and the token after it, t_(j+1):
x = fc [embed(t_(j+1)); f_j] + b, then one Llama layer without an input norm (attention over the pairs before, x + attn;
then x + mlp(norm(x))). The target's own output matrix turns the predicted state into the draft law of t_(j+2).
Reference: SafeAILab/EAGLE, `eagle/model/cnets1.py` and `cnets.py`; HASS checkpoints are of the same form.

The pair (f_j, t_(j+1)) stands at position j. Below the last real pair the head feeds itself its own predictions, one
pair for each node of the draft tree.

Tensors: `eagle.fc.weight` (2h, h), `eagle.fc.bias` (h, optional), `eagle.attn_{q,k,v,output}.weight`,
`eagle.attn_{q,k,v}.bias` (optional), `eagle.ffn_norm.weight`, `eagle.ffn_{gate,up,down}.weight`, `token_embd.weight`
(optional). Rotary pairs are the halves of a head, as in Hugging Face's checkpoints.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError, OptionError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32, I32, I64
from specrun.bindings.ggml.graph import Graph, GraphBuilder, Rope, Tensor
from specrun.bindings.ggml.target_tensors import TargetTensors
from specrun.bindings.ggml.weights import TensorStore, load_tensors
from specrun.bindings.model import Model
from specrun.runtime.heads.head_file import HeadFile

__all__ = ["EagleHead", "EagleRows", "EagleSizes"]

FloatRows = npt.NDArray[np.float32]

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)  # few graphs serve all numbers of pairs: others are filled up
_CELLS = 256  # attention reads the cache in steps of this size, so that few graphs serve all lengths
_MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class EagleSizes:
    """The sizes of a head's one layer, as its file states them."""

    hidden: int
    words: int
    n_heads: int
    n_kv_heads: int
    feed_forward: int
    rope_base: float
    norm_eps: float

    @property
    def head_size(self) -> int:
        """Numbers of one attention head."""
        return self.hidden // self.n_heads

    @property
    def kv_size(self) -> int:
        """Numbers of one position's keys."""
        return self.n_kv_heads * self.head_size


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
        self.sizes = _sizes(file)
        self.native_seconds = 0.0
        self.n_params = file.header.n_parameters
        self.n_cells = -(-n_cells // _CELLS) * _CELLS
        self._spare = self.n_cells  # where pairs that only fill up a graph write
        self._ranks = min(ranks, self.sizes.words)
        self._whole_rows = whole_rows
        names = _tensor_names(file, self.sizes)
        self._device = ComputeDevice(gpu=target.n_gpu_layers != 0, n_threads=n_threads)
        self._target = TargetTensors(target, self._device)
        self._stores: list[TensorStore] = []
        self._graphs: dict[tuple[int, int], Graph] = {}
        try:
            self._weights = load_tensors(path, self._device, names)
            self._stores.append(self._weights)
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
        length = -(-used // _CELLS) * _CELLS
        width = next((one for one in _WIDTHS if one >= n), n)
        graph = self._graphs.get((width, length))
        if graph is None:
            graph = self._graphs[width, length] = self._build(width, length)
        inputs = _filled_up(tokens, states, positions, cells, sees, width, length, self._spare)
        started = time.perf_counter()
        found = graph.run(inputs)
        self.native_seconds += time.perf_counter() - started
        values = _floats(found["values"])[:n]
        order = np.argsort(-values, axis=1, kind="stable")
        return EagleRows(
            _floats(found["states"])[:n],
            np.take_along_axis(found["words"].astype(np.int32, copy=False)[:n], order, 1),
            np.take_along_axis(values, order, 1) - _floats(found["total"])[:n],
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
            x = builder.mul_mat(self._weight("fc.weight"), pair)
            if "eagle.fc.bias" in self._weights:
                x = builder.add(x, self._weight("fc.bias"))
            x = builder.add(x, self._attention(builder, x, n, length))
            normed = builder.rms_norm(x, self._weight("ffn_norm.weight"), sizes.norm_eps)
            gate, up = (builder.mul_mat(self._weight(f"ffn_{name}.weight"), normed) for name in ("gate", "up"))
            x = builder.add(x, builder.mul_mat(self._weight("ffn_down.weight"), builder.swiglu(gate, up)))
            logits = builder.mul_mat(self._output, x)
            best = builder.top_k(logits, self._ranks)
            builder.output("states", x)
            builder.output("words", best)
            builder.output("values", builder.pick(logits, best, self._ranks))
            builder.output("total", builder.log_sum_exp(logits))
            if self._whole_rows:
                builder.output("logits", logits)
            return builder.build()
        finally:
            builder.close()

    def _attention(self, builder: GraphBuilder, x: Tensor, n: int, length: int) -> Tensor:
        sizes, d = self.sizes, self.sizes.head_size
        positions, cells = builder.input("positions", I32, n), builder.input("cells", I64, n)
        mask = builder.input("mask", F32, length, n)
        rope = Rope(d, freq_base=sizes.rope_base, neox=True)

        def heads(name: str, count: int, *, rotate: bool) -> Tensor:
            linear = builder.mul_mat(self._weight(f"attn_{name}.weight"), x)
            if f"eagle.attn_{name}.bias" in self._weights:
                linear = builder.add(linear, self._weight(f"attn_{name}.bias"))
            split = builder.reshape(linear, d, count, n)
            return builder.rope(split, positions, rope) if rotate else split

        query = heads("q", sizes.n_heads, rotate=True)
        for name, cache, rotate in (("k", "keys", True), ("v", "values", False)):
            rows = builder.reshape(heads(name, sizes.n_kv_heads, rotate=rotate), sizes.kv_size, n)
            builder.keep(builder.set_rows(Tensor(self._cache[cache]), rows, cells))
        keys, values = (
            builder.reshape(builder.first_rows(Tensor(self._cache[name]), length), d, sizes.n_kv_heads, length)
            for name in ("keys", "values")
        )
        scores = builder.mul_mat(builder.permute(keys, 0, 2, 1, 3), builder.permute(query, 0, 2, 1, 3))
        weights = builder.soft_max(scores, mask, 1.0 / math.sqrt(d))
        by_cell = builder.contiguous(builder.permute(values, 1, 2, 0, 3))
        mixed = builder.permute(builder.mul_mat(by_cell, weights), 0, 2, 1, 3)
        joined = builder.reshape(builder.contiguous(mixed), sizes.hidden, n)
        return builder.mul_mat(self._weight("attn_output.weight"), joined)

    def _weight(self, name: str) -> Tensor:
        return Tensor(self._weights[f"eagle.{name}"])


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


def _sizes(file: HeadFile) -> EagleSizes:
    hidden, heads, kv = (
        file.size("embedding_length"),
        file.size("attention.head_count"),
        file.size("attention.head_count_kv"),
    )
    if hidden % heads or heads % kv or (hidden // heads) % 2:
        raise MalformedFileError(
            f"{file.path} has {heads} heads and {kv} key-value heads for hidden states of {hidden}: convert it again"
        )
    return EagleSizes(
        hidden=hidden,
        words=file.size("vocab_size"),
        n_heads=heads,
        n_kv_heads=kv,
        feed_forward=file.size("feed_forward_length"),
        rope_base=file.number("rope.freq_base", 10000.0),
        norm_eps=file.number("attention.layer_norm_rms_epsilon", 1e-6),
    )


def _tensor_names(file: HeadFile, sizes: EagleSizes) -> list[str]:
    """Return all tensors of the file that are used, checked."""
    h, kv, wide = sizes.hidden, sizes.kv_size, sizes.feed_forward
    names = [
        file.require("eagle.fc.weight", (2 * h, h)),
        file.require("eagle.attn_q.weight", (h, h)),
        file.require("eagle.attn_k.weight", (h, kv)),
        file.require("eagle.attn_v.weight", (h, kv)),
        file.require("eagle.attn_output.weight", (h, h)),
        file.require("eagle.ffn_norm.weight", (h,)),
        file.require("eagle.ffn_gate.weight", (h, wide)),
        file.require("eagle.ffn_up.weight", (h, wide)),
        file.require("eagle.ffn_down.weight", (wide, h)),
    ]
    optional = {
        "eagle.fc.bias": (h,),
        "eagle.attn_q.bias": (h,),
        "eagle.attn_k.bias": (kv,),
        "eagle.attn_v.bias": (kv,),
    }
    for name, shape in (*optional.items(), ("token_embd.weight", (h, sizes.words))):
        if name in file:
            names.append(file.require(name, shape))
    return names
