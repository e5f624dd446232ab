"""Medusa's heads (Cai et al. 2024, section 2.1.1) as a ggml graph.

Head k predicts the word k + 1 places after the one that the target itself predicts, from the same final hidden state h:
p_k = softmax(W2_k (SiLU(W1_k h + b_k) + h)). Several residual blocks follow one another. Without W2_k of its own a head
uses the target's output matrix.

Tensors: `medusa.{k}.res.{j}.weight` (h, h) and `.bias` (h), `medusa.{k}.output.weight` (h, words); metadata
`medusa.embedding_length`, `.vocab_size`, `.head_count`, `.block_count`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32
from specrun.bindings.ggml.graph import Graph, GraphBuilder, Tensor
from specrun.bindings.ggml.target_tensors import TargetTensors
from specrun.bindings.ggml.weights import TensorStore, load_tensors
from specrun.bindings.model import Model
from specrun.runtime.heads.head_file import HeadFile

__all__ = ["MedusaHead"]

_MAX_HEADS, _MAX_BLOCKS = 32, 16


class MedusaHead:
    """The heads of a file on the target's device. `close()` it before the target.

    `ranks[k]` is how many words head k has to name; fewer entries than heads leave the last heads out.
    """

    def __init__(
        self, path: str | os.PathLike[str], target: Model, *, n_threads: int = 0, ranks: Sequence[int] | None = None
    ) -> None:
        file = HeadFile(path, "medusa")
        file.check_target(target)
        self.n_heads = file.size("head_count", _MAX_HEADS)
        self.accuracies = file.numbers("node_accuracy")
        self.native_seconds = 0.0
        self.n_params = file.header.n_parameters
        self._names = _tensor_names(file, self.n_heads)
        self._width = target.n_embd
        self._graph: Graph | None = None
        self._ranks: tuple[int, ...] = ()
        self._device = ComputeDevice(gpu=target.n_gpu_layers != 0, n_threads=n_threads)
        self._target = TargetTensors(target, self._device)
        self._weights: TensorStore | None = None
        try:
            self._weights = load_tensors(path, self._device, [name for head in self._names for name in head])
            if ranks is not None:
                self.prepare(ranks)
        except BaseException:
            self.close()
            raise

    def prepare(self, ranks: Sequence[int]) -> None:
        """Build the graph for heads that name so many words each."""
        if not 0 < len(ranks) <= self.n_heads:
            raise OptionError(f"a tree of depth {len(ranks)}: these Medusa heads reach 1 to {self.n_heads} tokens deep")
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        builder = GraphBuilder(self._device)
        try:
            features = builder.input("features", F32, self._width, 1)
            for head, count in enumerate(ranks):
                logits = self._logits(builder, head, features)
                best = builder.top_k(logits, count)
                builder.output(f"words{head}", best)
                builder.output(f"values{head}", builder.pick(logits, best, count))
            self._graph = builder.build()
        finally:
            builder.close()
        self._ranks = tuple(ranks)

    def best_words(self, features: npt.NDArray[np.float32]) -> list[list[int]]:
        """Return each head's words for a final hidden state [hidden], the most likely first."""
        if self._graph is None:
            raise OptionError("Medusa heads need their tree before they can be asked")
        started = time.perf_counter()
        found = self._graph.run({"features": features})
        self.native_seconds += time.perf_counter() - started
        words: list[list[int]] = []
        for head in range(len(self._ranks)):
            order = np.argsort(-found[f"values{head}"][0], kind="stable")
            words.append(found[f"words{head}"][0][order].tolist())
        return words

    def close(self) -> None:
        """Free graph, weights and device."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._target.close()
        self._device.close()

    def _logits(self, builder: GraphBuilder, head: int, features: Tensor) -> Tensor:
        assert self._weights is not None
        *blocks, output = self._names[head] if len(self._names[head]) % 2 else (*self._names[head], None)
        state = features
        for weight, bias in zip(blocks[0::2], blocks[1::2], strict=True):
            linear = builder.mul_mat(Tensor(self._weights[str(weight)]), state)
            state = builder.add(state, builder.silu(builder.add(linear, Tensor(self._weights[str(bias)]))))
        words = self._target.output() if output is None else Tensor(self._weights[output])
        return builder.mul_mat(words, state)


def _tensor_names(file: HeadFile, n_heads: int) -> list[list[str]]:
    """Return each head's tensors in order, checked: weight and bias of its blocks, then its output if it has one."""
    hidden, words = file.size("embedding_length"), file.size("vocab_size")
    n_blocks = file.size("block_count", _MAX_BLOCKS)
    names: list[list[str]] = []
    for head in range(n_heads):
        own: list[str] = []
        for block in range(n_blocks):
            own.append(file.require(f"medusa.{head}.res.{block}.weight", (hidden, hidden)))
            own.append(file.require(f"medusa.{head}.res.{block}.bias", (hidden,)))
        output = f"medusa.{head}.output.weight"
        names.append([*own, file.require(output, (hidden, words))] if output in file else own)
    return names
