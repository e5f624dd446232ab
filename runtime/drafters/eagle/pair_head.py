"""EAGLE's heads in general: one Llama layer over pairs, as ggml graphs with a key-value cache.

A head is weights, loaded once (`PairHead`); every conversation that drafts with it has cells of its
own (`PairHead.cells`, see `pair_cells`).

The pair (f_j, t_(j+1)) joins a state of the target at position j with the token after it, and
stands at position j. The head predicts the next state, and with an output matrix the draft law of
t_(j+2). Below the last real pair it feeds itself its own predictions, one pair for each node of the
draft tree.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Required, TypedDict

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.graph import GraphBuilder
from specrun.bindings.ggml.target_tensors import TargetTensors, device_for_heads
from specrun.bindings.ggml.tensor import Tensor
from specrun.bindings.ggml.weights import TensorStore, load_tensors
from specrun.bindings.models.model import Model
from specrun.runtime.costs.memory_traffic import multiplied
from specrun.runtime.drafters.eagle.pair_cells import PairCells
from specrun.runtime.heads.attention import AttentionSizes, LayerWeights, Places, decoder_layer
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.heads.text_rows import FloatRows

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def multiplied_of_pair(file: HeadFile, target: Model, n_drafted: int | None) -> float:
    """Return how many parameters a depth multiplies: the head's, and an output matrix.

    That is the target's where the file has none, of the `n_drafted` tokens alone, if that is given.
    """
    own = multiplied(file.header, file.header.tensors)
    rows = 0 if _OUTPUT in file else n_drafted or target.vocabulary.size
    return own + target.n_embd * rows


class PairOptions(TypedDict, total=False):
    """How a head is opened: what is said after each pair, and with how many threads.

    `ranks` is how many tokens are named; `whole_rows` returns all logits, for draws.
    """

    ranks: Required[int]
    whole_rows: bool
    n_threads: int


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes of a head and of its layer."""

    hidden: int
    """Of its predicted states."""
    features: int
    """Of the target's features in a pair."""
    vocab_size: int
    """How many tokens it knows."""
    feed_forward: int
    norm_eps: float
    attention: AttentionSizes


class PairHead(ABC):
    """The weights of a head on the target's device. Close it between its cells and the target.

    `names` are the tensors of the file to load, those of the layer beginning with `prefix`;
    embedding and output matrix are the target's where the file has none, of the tokens `drafted`
    alone where these are given. For the other options see `PairOptions`.
    """

    taps: tuple[int, ...] = ()
    """The layers of the target whose inputs are its features; none: the final hidden state."""

    def __init__(
        self,
        file: HeadFile,
        names: Sequence[str],
        prefix: str,
        sizes: PairSizes,
        target: Model,
        drafted: npt.NDArray[np.int32] | None = None,
        *,
        ranks: int,
        whole_rows: bool = False,
        n_threads: int = 0,
    ) -> None:
        self.sizes = sizes
        self.n_params = file.header.n_parameters
        n_drafted = None if drafted is None else len(drafted)
        self.depth_params = multiplied_of_pair(file, target, n_drafted)
        self.ranks = min(ranks, sizes.vocab_size)
        self.whole_rows = whole_rows
        self.device = ComputeDevice(device_for_heads(target), n_threads=n_threads)
        self._prefix = prefix
        self._target = TargetTensors(target, self.device)
        self._stores: list[TensorStore] = []
        self._chain_ids: Tensor | None = None
        # The target's tokens by the head's, where these differ.
        self._target_ids = drafted
        self._target_vocab_size = target.vocabulary.size
        try:
            self._weights = load_tensors(file.path, self.device, names)
            self._stores.append(self._weights)
            self.embedding = self._own(_EMBEDDING) or self._target.embedding()
            self.output = self._own(_OUTPUT) or self._target_output()
            self.n_embeddings = self.embedding.shape[1]
        except BaseException:
            self.close()
            raise

    @property
    def native_seconds(self) -> float:
        """Time in the graphs of all cells."""
        return self.device.native_seconds

    def cells(self, n_cells: int) -> PairCells:
        """Return room for `n_cells` pairs of one conversation, none of them known."""
        return PairCells(self, n_cells)

    def close(self) -> None:
        """Free weights and device; calling it again does nothing."""
        while self._stores:
            self._stores.pop().close()
        self._target.close()
        self.device.close()

    # -- what a kind of head says ------------------------------------------------------------------

    def fused(self, builder: GraphBuilder, features: Tensor) -> Tensor:
        """Return the states (hidden, n) that the features (features, n) become."""
        return features

    @abstractmethod
    def predicted(
        self, builder: GraphBuilder, tokens: Tensor, states: Tensor, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Return the predicted states (hidden, n), and what the output matrix reads of them."""

    def target_rows(self, logits: FloatRows) -> FloatRows:
        """Return logits over the head's tokens, [n, vocab], as logits over the target's.

        Those that the head does not know get -inf.
        """
        if self._target_ids is None:
            return logits
        # Zero mass in the draft law: exact, the target itself says what the head cannot.
        rows = np.full((len(logits), self._target_vocab_size), -np.inf, np.float32)
        rows[:, self._target_ids] = logits
        return rows

    @functools.cached_property
    def most_highest(self) -> int:
        """How many of the highest logits its cells can be asked for.

        None where the order of its own tokens is not that of the target's.
        """
        ids = self._target_ids
        return self.sizes.vocab_size if ids is None or bool((np.diff(ids) > 0).all()) else 0

    def target_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the target's tokens for the head's, [n, ranks]."""
        return tokens if self._target_ids is None else self._target_ids[tokens]

    def chain_ids(self) -> Tensor | None:
        """Return the target's tokens by the head's, I32 (1, vocab), None where they are the same.

        Graphs of chains feed them on. Raises UnsupportedModelError where one has no embedding.
        """
        ids = self._target_ids
        # A chain's tokens go on unchecked, and one without an embedding would end the process.
        largest = self.output.shape[1] - 1 if ids is None else int(ids.max())
        if largest >= self.n_embeddings:
            raise UnsupportedModelError(f"token {largest} of an EAGLE head has no embedding")
        if ids is not None and self._chain_ids is None:
            store = TensorStore(self.device, {"ids": ("I32", (1, len(ids)))})
            self._stores.append(store)
            store.write("ids", ids)
            self._chain_ids = Tensor(store["ids"])
        return self._chain_ids

    # -- the parts of a layer ----------------------------------------------------------------------

    def _weight(self, name: str) -> Tensor:
        return Tensor(self._weights[f"{self._prefix}{name}"])

    def _own(self, name: str) -> Tensor | None:
        return Tensor(self._weights[name]) if name in self._weights else None

    def _target_output(self) -> Tensor:
        if self._target_ids is None:
            return self._target.output()
        return self._target.output_rows(self._target_ids)

    def _layer(
        self,
        builder: GraphBuilder,
        x: Tensor,
        residual: Tensor,
        places: Places,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Return y + mlp(norm(y)) with y = residual + attention(x)."""
        weights = LayerWeights(self._weights, self._prefix)
        return decoder_layer(builder, weights, x, residual, places, self.sizes.norm_eps, factors)
