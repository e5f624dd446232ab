"""Medusa's heads (Cai et al. 2024, section 2.1.1) as a ggml graph.

Head k predicts the token k + 1 places after the one that the target itself predicts, from the same
final hidden state h: p_k = softmax(W2_k (SiLU(W1_k h + b_k) + h)). Several residual blocks follow
one another. Without W2_k of its own a head uses the target's output matrix.

Tensors: `medusa.{k}.res.{j}.weight` (h, h) and `.bias` (h), `medusa.{k}.output.weight` (h, vocab);
metadata `medusa.embedding_length`, `.vocab_size`, `.head_count`, `.block_count`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32
from specrun.bindings.ggml.graph import GraphBuilder
from specrun.bindings.ggml.ready_graph import Graph
from specrun.bindings.ggml.target_tensors import TargetTensors, device_for_heads
from specrun.bindings.ggml.tensor import Tensor
from specrun.bindings.ggml.weights import TensorStore, load_tensors
from specrun.bindings.models.model import Model
from specrun.runtime.costs.memory_traffic import multiplied
from specrun.runtime.heads import HeadFile, stored_accuracy

_MAX_HEADS, _MAX_BLOCKS = 32, 16
_OPERATIONS = 40  # of a graph for each head, beside two for each tensor of its blocks
MOST_STATES = 16
"""Hidden states of one evaluation: of several conversations, or of a whole text."""


@dataclass(slots=True)
class HeadsSaid:
    """What the heads say after a state: each one's tokens, the most likely first.

    `probabilities` are those of the tokens by their heads, where these were prepared for that.
    """

    tokens: list[list[int]]
    probabilities: list[list[float]]


class MedusaHead:
    """The weights of a file's heads on the target's device. Close it before the target.

    What they say depends on the hidden state alone, so conversations share their graph, too.
    `ranks[k]` is how many tokens head k has to name; heads without an entry are left out.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        *,
        n_threads: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> None:
        file = HeadFile(path, "medusa")
        file.check_target(target)
        self.n_heads = file.size("head_count", _MAX_HEADS)
        self.accuracy = stored_accuracy(file, self.n_heads)
        self.n_params = file.header.n_parameters
        self._names = _tensor_names(file, self.n_heads)
        self._width, self._vocab_size = target.n_embd, target.vocabulary.size
        # Heads that read the target's output matrix: weights and biases of their blocks are pairs.
        shared = sum(len(own) % 2 == 0 for own in self._names)
        own = multiplied(file.header, file.header.tensors)
        self.evaluated_params = own + shared * self._width * self._vocab_size
        self.whole_rows = False
        self._graphs: dict[int, Graph] = {}  # by how many states they take
        self._ranks: tuple[int, ...] = ()
        self._named: tuple[str, ...] = ()  # the outputs of each head's tokens
        self._probabilities = False
        self.device = ComputeDevice(device_for_heads(target), n_threads=n_threads)
        self._target = TargetTensors(target, self.device)
        self._weights: TensorStore | None = None
        try:
            names = [name for head in self._names for name in head]
            self._weights = load_tensors(path, self.device, names)
            if ranks is not None:
                self.prepare(ranks)
        except BaseException:
            self.close()
            raise

    @property
    def native_seconds(self) -> float:
        """Time in the graphs."""
        return self.device.native_seconds

    def prepare(
        self, ranks: Sequence[int], *, probabilities: bool = False, whole_rows: bool = False
    ) -> None:
        """Build the graph for one hidden state and heads that name so many tokens each.

        With `probabilities` it says those, too, with `whole_rows` all logits.
        """
        # Built before the old ones are closed: a refused shape leaves the heads as they were.
        graph = self._build(ranks, 1, probabilities=probabilities, whole_rows=whole_rows)
        self.whole_rows, self._probabilities = whole_rows, probabilities
        self._close_graphs()
        self._graphs[1], self._ranks = graph, tuple(ranks)
        self._named = tuple(f"tokens{head}" for head in range(len(self._ranks)))

    def _close_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()

    def tokens_along(
        self, features: npt.NDArray[np.float32], ranks: int
    ) -> Iterator[list[list[int]]]:
        """Yield for each hidden state [n, hidden] what `said_of` names, `ranks` of each head.

        Several states share an evaluation, and so the reading of the weights.
        """
        with closing(self._build([ranks] * self.n_heads, MOST_STATES)) as graph:
            for start in range(0, len(features), MOST_STATES):
                piece = features[start : start + MOST_STATES]
                rows = graph.inputs["features"]
                rows[: len(piece)], rows[len(piece) :] = piece, 0.0
                found = self._compute(graph, self.n_heads)
                for row in range(len(piece)):
                    yield [tokens[row] for tokens in found]

    def _build(
        self,
        ranks: Sequence[int],
        rows: int,
        *,
        probabilities: bool = False,
        whole_rows: bool = False,
    ) -> Graph:
        """Return the graph that names so many tokens of each head for `rows` hidden states."""
        if not 0 < len(ranks) <= self.n_heads:
            reach = f"these Medusa heads reach 1 to {self.n_heads} tokens deep"
            raise OptionError(f"a tree of depth {len(ranks)}: {reach}")
        if max(ranks) > self._vocab_size:
            known = f"these Medusa heads know {self._vocab_size} tokens"
            raise OptionError(f"a tree of {max(ranks)} branches: {known}")
        n_operations = sum(2 * len(names) + _OPERATIONS for names in self._names)
        with closing(GraphBuilder(self.device, n_operations)) as builder:
            features = builder.input("features", F32, self._width, rows)
            for head, count in enumerate(ranks):
                logits = self._logits(builder, head, features)
                # Only the ranks leave the device: a row of logits is large.
                best = builder.best(logits, count)
                builder.output(f"tokens{head}", best[0])
                if probabilities:
                    total = builder.log_sum_exp(logits, best)
                    builder.output(f"log_probs{head}", builder.sub(best[1], total))
                if whole_rows:
                    builder.output(f"logits{head}", logits)
            return builder.build()

    def said_of(self, states: npt.NDArray[np.float32]) -> list[HeadsSaid]:
        """Return what the heads say after each final hidden state [n, hidden], in one evaluation.

        At most `MOST_STATES`. Raises `OptionError` before the heads were prepared.
        """
        n = len(states)
        if n == 1:
            return [self.said_of_one(states)]
        graph = self._graph_of(n)
        rows = graph.inputs["features"]
        rows[:n], rows[n:] = states, 0.0
        tokens = self._compute(graph, len(self._ranks))
        shares: list[npt.NDArray[np.float64]] = []
        if self._probabilities:
            heads = range(len(self._ranks))
            shares = [np.exp(graph.peek(f"log_probs{head}")) for head in heads]
        return [
            HeadsSaid([own[row] for own in tokens], [own[row].tolist() for own in shares])
            for row in range(n)
        ]

    def said_of_one(self, state: npt.NDArray[np.float32]) -> HeadsSaid:
        """Return what the heads say after one final hidden state [1, hidden], as `said_of`."""
        graph = self._graphs.get(1) or self._graph_of(1)
        graph.inputs["features"][...] = state
        graph.compute()
        tokens = graph.numbers(*self._named)
        if not self._probabilities:
            return HeadsSaid(tokens, [])
        shares = (graph.peek(f"log_probs{head}") for head in range(len(self._ranks)))
        return HeadsSaid(tokens, [np.exp(share[0]).tolist() for share in shares])

    def _graph_of(self, n: int) -> Graph:
        """Return a graph for n states: one, or the next power of two of them."""
        if not self._graphs:
            raise OptionError("Medusa heads need their tree before they can be asked")
        width = 1 << (n - 1).bit_length()
        if width not in self._graphs:
            self._graphs[width] = self._build(
                self._ranks, width, probabilities=self._probabilities, whole_rows=False
            )
        return self._graphs[width]

    @property
    def rows(self) -> list[npt.NDArray[np.float32]]:
        """Each head's whole row of logits of the last state that was asked about alone: views."""
        graph = self._graphs[1]
        rows = [graph.peek(f"logits{head}")[0] for head in range(len(self._ranks))]
        return [row.astype(np.float32, copy=False) for row in rows]

    def _compute(self, graph: Graph, n_heads: int) -> list[list[list[int]]]:
        """Return the tokens of each head for each row of the graph's inputs."""
        graph.compute()
        return [graph.peek(f"tokens{head}").tolist() for head in range(n_heads)]

    def close(self) -> None:
        """Free graph, weights and device."""
        self._close_graphs()
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._target.close()
        self.device.close()

    def _logits(self, builder: GraphBuilder, head: int, features: Tensor) -> Tensor:
        assert self._weights is not None
        own = self._names[head]
        # Blocks are pairs, so an odd number of names ends with an output matrix.
        *blocks, output = own if len(own) % 2 else (*own, None)
        state = features
        for weight, bias in zip(blocks[0::2], blocks[1::2], strict=True):
            linear = builder.mul_mat(Tensor(self._weights[str(weight)]), state)
            activated = builder.silu(builder.add(linear, Tensor(self._weights[str(bias)])))
            state = builder.add(state, activated)
        matrix = self._target.output() if output is None else Tensor(self._weights[output])
        return builder.mul_mat(matrix, state)


def _tensor_names(file: HeadFile, n_heads: int) -> list[list[str]]:
    """Return each head's tensors, checked: weights and biases of its blocks, its output if any."""
    hidden, vocab_size = file.size("embedding_length"), file.size("vocab_size")
    n_blocks = file.size("block_count", _MAX_BLOCKS)
    names: list[list[str]] = []
    for head in range(n_heads):
        own: list[str] = []
        for block in range(n_blocks):
            own.append(file.require(f"medusa.{head}.res.{block}.weight", (hidden, hidden)))
            own.append(file.require(f"medusa.{head}.res.{block}.bias", (hidden,)))
        output = f"medusa.{head}.output.weight"
        names.append([*own, file.require(output, (hidden, vocab_size))] if output in file else own)
    return names
