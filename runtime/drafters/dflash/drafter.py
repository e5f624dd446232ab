"""A block drafter in llama.cpp: its model, which conversations share, and the cells of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts import (
    Batch,
    BlockContext,
    ContextOptions,
    Lender,
    Rows,
    block_options,
    needs_lender,
)
from specrun.bindings.ggml import ComputeDevice, Graph, GraphBuilder
from specrun.bindings.ggml.tensor import I32
from specrun.bindings.ggml.weights import TargetTensors, device_for_heads, read_numbers
from specrun.bindings.models import Model
from specrun.runtime.drafters.dflash.file import MARKOV, VOCABULARY_MAP, BlockFile
from specrun.runtime.drafters.dflash.rows import BlockRows, LatticeRows, MarginalRows, MarkovRows
from specrun.runtime.heads import FloatRows, NativeShare, RowPiece, filled_width
from specrun.runtime.planning.theory import multiplied
from specrun.runtime.round.drafter import close_all

_MARKOV_OUT = "markov_w2.weight"


class BlockDrafter:
    """The model of a block drafter's file, for the target that it was made for.

    Close it after the cells of all conversations, and before the target. Raises as `BlockFile.read`
    and `Model` do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        *,
        n_gpu_layers: int = 0,
        use_mmap: bool = True,
        n_threads: int = 0,
    ) -> None:
        self.file = BlockFile.read(path, target)
        self.target = target
        self._lender: Lender | None = None
        self.markov: MarkovHead | None = None
        self.model = Model(path, n_gpu_layers=n_gpu_layers, use_mmap=use_mmap, drafts=True)
        try:
            if needs_lender(self.model):
                self._lender = Lender(target)
            if self.file.generation == "DSpark":
                self.markov = MarkovHead(self.model, n_threads=n_threads)
        except BaseException:
            self.close()
            raise

    @property
    def n_params(self) -> int:
        """The parameters of its file."""
        return self.model.n_params

    @property
    def multiplied(self) -> float:
        """The parameters that each token of a block multiplies, the target's output among them."""
        own = multiplied(self.model.header, self.model.header.tensors)
        names = {tensor.name for tensor in self.model.header.tensors}
        has_output = not names.isdisjoint(("output.weight", "token_embd.weight"))
        return own + (0 if has_output else self.model.n_embd * self.target.vocabulary.size)

    def cells(self, options: ContextOptions, n_slots: int) -> BlockCells:
        """Return the cells of a conversation, whose block predicts so many tokens."""
        return BlockCells(self, self._lender, options, n_slots)

    def close(self) -> None:
        """Free the model; again does nothing."""
        close_all([own for own in (self.markov, self._lender, self.model) if own is not None])


class BlockCells:
    """One conversation's keys and values in a block drafter, and its block. It owns the context."""

    def __init__(
        self, drafter: BlockDrafter, lender: Lender | None, options: ContextOptions, n_slots: int
    ) -> None:
        file = self._file = drafter.file
        self._markov = drafter.markov
        self._share = None if drafter.markov is None else NativeShare(drafter.markov.device)
        self.width = file.first + n_slots
        """The tokens of its block."""
        self.n_cells = options.n_ctx
        own = block_options(options, self.width)
        self._context = BlockContext(drafter.model, own, lender, causal=file.causal)
        width = len(file.taps) * drafter.target.n_embd
        self._features = self._context.feature_batch(width)
        self._block = Batch(self.width, 1)
        self._masks = [file.mask] * (self.width - 1)
        # A selector's scores come with the block's states: its logits need not be copied.
        self._n_outputs = 0 if file.generation == "DFlash2" else self.width

    @property
    def native_seconds(self) -> float:
        """Time in the evaluations of this conversation."""
        markov = 0.0 if self._share is None else self._share.seconds
        return self._context.native_seconds + markov

    def put(self, piece: RowPiece) -> bool:
        """Write keys and values of a text's next features, behind the first `count`; return True.

        What lay there and behind, such as the last block's, is dropped first: a block sees all
        cells, in whichever order.
        """
        self._drop(piece.position if piece.count else 0)
        n = len(piece)
        self._features.fill_chain([0] * n, piece.position, (0,), 0)
        self._features.give(piece.rows)
        self._context.decode(self._features)
        return True

    def block(self, last: int, position: int) -> BlockRows:
        """Evaluate the block of a text whose last token stands at a position; return its rows."""
        self._drop(position)
        self._block.fill_chain([last, *self._masks], position, (0,), self._n_outputs)
        return self._rows_of(self._context.decode(self._block), last)

    def _drop(self, position: int) -> None:
        if position:
            self._context.memory.truncate(position)
        else:
            self._context.memory.clear()

    def _rows_of(self, rows: Rows, last: int) -> BlockRows:
        file = self._file
        slots = range(file.first, self.width)
        if file.generation == "DFlash2":
            k = file.top_k
            packed = np.stack([rows.nextn_state(slot)[: k + k * k] for slot in slots])
            candidates = packed[:, :k].astype(np.int32)
            return LatticeRows(candidates, packed[:, k:].reshape(-1, k, k), file.vocab_size)
        logits = [rows.logits(slot) for slot in slots]
        if self._markov is None:
            return MarginalRows(logits)
        confidences = None
        if file.has_confidence:  # the same number in all places of a state
            confidences = [float(rows.nextn_state(slot)[0]) for slot in slots]
        return MarkovRows(logits, last, self._biases, self._markov.drafted, confidences)

    def _biases(self, tokens: Sequence[int]) -> FloatRows:
        assert self._markov is not None
        assert self._share is not None
        with self._share:
            return self._markov.biases(tokens)

    def close(self) -> None:
        """Free the context; again does nothing."""
        self._context.close()


class MarkovHead:
    """DSpark's Markov head as a ggml graph over the drafter's own tensors, where ggml shares them.

    `drafted` are the tokens of a draft vocabulary, None for all. Close it before the model.
    """

    def __init__(self, model: Model, *, n_threads: int = 0) -> None:
        self._graphs: dict[int, Graph] = {}
        self.device = ComputeDevice(device_for_heads(model), n_threads=n_threads)
        self._tensors = TargetTensors(model, self.device)
        self.drafted: npt.NDArray[np.int64] | None = None
        names = {tensor.name for tensor in model.header.tensors}
        try:
            if VOCABULARY_MAP in names:
                self.drafted = read_numbers(model.path, VOCABULARY_MAP, np.int64)
            self._graph(1)
        except BaseException:
            self.close()
            raise

    def biases(self, tokens: Sequence[int]) -> FloatRows:
        """Return what it adds to the logits of drafted tokens after each of these, [n, drafted]."""
        width = filled_width(len(tokens))
        filled = np.array([*tokens, *[tokens[0]] * (width - len(tokens))], np.int32)
        rows = self._graph(width).run({"tokens": filled})["biases"]
        return rows[: len(tokens)].astype(np.float32, copy=False)

    def _graph(self, width: int) -> Graph:
        graph = self._graphs.get(width)
        if graph is None:
            with closing(GraphBuilder(self.device, max_operations=4)) as builder:
                tokens = builder.input("tokens", I32, width)
                states = builder.get_rows(self._tensors.table(MARKOV), tokens)
                biases = builder.mul_mat(self._tensors.named(_MARKOV_OUT), states)
                builder.output("biases", biases)
                graph = self._graphs[width] = builder.build()
        return graph

    def close(self) -> None:
        """Free graphs and device; again does nothing."""
        while self._graphs:
            self._graphs.popitem()[1].close()
        self._tensors.close()
        self.device.close()
