"""A block drafter in llama.cpp: its model, which conversations share, and the cells of each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import takewhile
from typing import cast

import numpy as np

from specrun.bindings.contexts import (
    BLOCK_ARCHITECTURE,
    Batch,
    BlockContext,
    Context,
    ContextOptions,
    Lender,
    Rows,
    block_options,
    needs_lender,
)
from specrun.bindings.errors import MalformedFileError
from specrun.bindings.ggml import F32, ComputeDevice, Graph, GraphBuilder, Tensor
from specrun.bindings.ggml.graph import Array
from specrun.bindings.ggml.tensor import I32
from specrun.bindings.ggml.weights import TargetTensors, device_for_heads, read_numbers
from specrun.bindings.models import Model, trusting_files
from specrun.runtime.drafters.batching import (
    ContextPart,
    DraftMeeting,
    SharedDraftContext,
    share_text,
)
from specrun.runtime.drafters.dflash.file import (
    CONFIDENCE,
    MARKOV,
    MARKOV_BIAS,
    MARKOV_WEIGHT,
    VOCABULARY_MAP,
    BlockFile,
    Blocks,
)
from specrun.runtime.drafters.dflash.rows import (
    BlockRows,
    Confidences,
    IdRows,
    LatentRows,
    LatticeRows,
    MarginalRows,
    MarkovRows,
)
from specrun.runtime.heads import FloatRows, HeadFile, NativeShare, RowPiece, filled_width
from specrun.runtime.planning.theory import multiplied
from specrun.runtime.round.drafter import close_all

_MARKOV_OUT = "markov_w2.weight"
_LATENT_KEYS = MARKOV_WEIGHT, MARKOV_BIAS


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
        self._shared: SharedBlocks | None = None
        with trusting_files():  # it was tried just now, if it had to be, with the target
            self.model = Model(path, n_gpu_layers=n_gpu_layers, use_mmap=use_mmap, drafts=True)
        try:
            if needs_lender(self.model):
                self._lender = Lender(target)
            if self.file.generation == "DSpark":
                kind = self.file.head
                head = MarkovHead if kind == "vanilla" else partial(LatentMarkovHead, kind)
                self.markov = head(self.model, n_threads=n_threads)
        except BaseException:
            self.close()
            raise

    @property
    def multiplied(self) -> float:
        """The parameters that each token of a block multiplies, the target's output among them."""
        own = multiplied(self.model.header, self.model.header.tensors)
        names = {tensor.name for tensor in self.model.header.tensors}
        has_output = not names.isdisjoint(("output.weight", "token_embd.weight"))
        return own + (0 if has_output else self.model.n_embd * self.target.vocabulary.size)

    @property
    def blocks(self) -> Blocks:
        """Its blocks, as the source and the builder see them."""
        file, few = self.file, self.file.generation == "DFlash2"
        sizes = self.model.n_params, self.multiplied
        return Blocks(file.title, file.n_slots, file.first, file.taps, *sizes, few)

    def cells(
        self, options: ContextOptions, n_slots: int, meeting: DraftMeeting | None = None
    ) -> BlockCells:
        """Return the cells of a conversation, whose block predicts so many tokens.

        At a meeting all conversations have one context, so their blocks are one evaluation.
        """
        file, width = self.file, self.file.first + n_slots
        own = block_options(options, width)
        reads_states = file.head != "vanilla"  # so llama.cpp has to show all tokens
        if reads_states:
            own = dataclasses.replace(own, hidden_states=True, n_outputs=own.n_batch)

        def opened(model: Model, options: ContextOptions) -> BlockContext:
            return BlockContext(model, options, self._lender, causal=file.causal)

        if meeting is None:
            return BlockCells(self, opened(self.model, own), n_slots)
        if self._shared is None:
            # All blocks are to be in one batch.
            at_once = max(own.n_batch, width * meeting.n_texts)
            shown = -(-at_once // meeting.n_texts) if reads_states else width
            wide = dataclasses.replace(own, n_batch=at_once, n_ubatch=at_once, n_outputs=shown)
            self._shared = SharedBlocks(meeting, self.model, wide, meeting.n_texts, opened)
        part = self._shared.part(copies=False)
        if part is None:  # all are taken
            return BlockCells(self, opened(self.model, own), n_slots)
        return BlockCells(self, cast("BlockContext", self._shared.context), n_slots, part)

    def close(self) -> None:
        """Free the model; again does nothing."""
        owned = (self._shared, self.markov, self._lender, self.model)
        close_all([own for own in owned if own is not None])


class SharedBlocks(SharedDraftContext):
    """A block drafter's context for several conversations, whose blocks are evaluated at once."""

    def fitting(self) -> list[ContextPart]:
        """Return the first requests of one size: llama.cpp's graph cuts a batch evenly."""
        size = self.asking[0].given.n_tokens
        return [*takewhile(lambda part: part.given.n_tokens == size, super().fitting())]


class BlockCells:
    """One conversation's keys and values in a block drafter, and its block.

    They are those of a `part` of a context, or without one it owns the whole context.
    """

    def __init__(
        self,
        drafter: BlockDrafter,
        context: BlockContext,
        n_slots: int,
        part: ContextPart | None = None,
    ) -> None:
        file = self._file = drafter.file
        self._markov = drafter.markov
        self._share = None if drafter.markov is None else NativeShare(drafter.markov.device)
        self.n_slots, width = n_slots, file.first + n_slots
        self._context, self.part = context, part
        self._owned: Context = context if part is None else part
        self._sequence = 0 if part is None else part.first
        self._seconds = 0.0
        self.n_cells = self._owned.n_ctx - width
        self._features = self._context.feature_batch(len(file.taps) * drafter.target.n_embd)
        self._block = Batch(width, 1)
        self._asked: tuple[int, range] | None = None

    @property
    def native_seconds(self) -> float:
        """Time in the evaluations of this conversation."""
        markov = 0.0 if self._share is None else self._share.seconds
        shared = 0.0 if self.part is None else self.part.native_seconds
        return self._seconds + shared + markov

    def put(self, piece: RowPiece) -> bool:
        """Write keys and values of a text's next features, behind the first `count`; return True.

        Cells there and behind, such as the last block's, are dropped first: a block sees all
        cells, in whichever order.
        """
        self._owned.memory.truncate(piece.position if piece.count else 0)
        n = len(piece)
        shown = n if self._context.options.hidden_states else 0  # then llama.cpp shows all
        self._features.fill_chain([0] * n, piece.position, (self._sequence,), shown)
        self._features.give(piece.rows)
        self._decode(self._features)
        return True

    def drop(self, n: int, position: int) -> None:
        """Forget the first n features of a text, which begin at a position."""
        self._owned.memory.truncate(0, position + n)

    def copy(self, other: BlockCells, base: int, count: int) -> bool:
        """Share or copy the features of another text, as far as they are in cells."""
        return share_text(other._owned, self._owned, base + count)

    def block(self, last: int, position: int, n_slots: int) -> BlockRows:
        """Evaluate a block that predicts so many tokens after a text's last one, at a position."""
        # A selector's scores come with the block's states: its logits need not be copied.
        rows = self._file.generation != "DFlash2"
        slots = self._fill(last, position, n_slots, self._sequence, with_rows=rows)
        return self._rows_of(self._decode(self._block), last, slots)

    def ask(self, last: int, position: int, n_slots: int) -> None:
        """Have such a block evaluated with those of other conversations."""
        assert self.part is not None
        self._asked = last, self._fill(last, position, n_slots, 0, with_rows=True)
        self.part.ask(self._block)

    def answer(self) -> BlockRows | None:
        """Return the rows of the requested block; None before it was evaluated."""
        rows = None if self.part is None else self.part.answered()
        return None if rows is None or self._asked is None else self._rows_of(rows, *self._asked)

    def _fill(
        self, last: int, position: int, n_slots: int, sequence: int, *, with_rows: bool
    ) -> range:
        """Fill the block's batch; return the places of its slots."""
        self._owned.memory.truncate(position)
        n = self._file.first + n_slots
        tokens = [last, *[self._file.mask] * (n - 1)]
        self._block.fill_chain(tokens, position, (sequence,), n if with_rows else 0)
        return range(self._file.first, n)

    def _decode(self, batch: Batch) -> Rows:
        before = self._context.native_seconds
        rows = self._context.decode(batch)
        self._seconds += self._context.native_seconds - before
        return rows

    def _rows_of(self, rows: Rows, last: int, slots: range) -> BlockRows:
        file = self._file
        if file.generation == "DFlash2":
            k = file.top_k
            packed = np.stack([rows.nextn_state(slot)[: k + k * k] for slot in slots])
            candidates = packed[:, :k].astype(np.int32)
            return LatticeRows(candidates, packed[:, k:].reshape(-1, k, k), file.vocab_size)
        logits = [rows.logits(slot) for slot in slots]
        if self._markov is None:
            return MarginalRows(logits)
        confidences = None
        if self._markov.moves is not None:  # the same number in all places of a state
            chances = [float(rows.nextn_state(slot)[0]) for slot in slots]
            confidences = Confidences(chances, self._markov.moves)
        if isinstance(self._markov, LatentMarkovHead):
            n = file.first
            hidden = rows.hidden_states(range(slots.stop))
            state = self._markov.started(last, hidden[:n])
            given = logits, last, self._markov, hidden[n:]
            return LatentRows(*given, state=state, confidences=confidences)
        return MarkovRows(logits, last, self._shifts, self._markov.drafted, confidences)

    def _shifts(self, tokens: Sequence[int], before: int, numbers: IdRows | None) -> FloatRows:
        assert self._markov is not None
        assert self._share is not None
        with self._share:
            return self._markov.shifts(tokens, before, numbers)

    def close(self) -> None:
        """Free the context, or give the part back; again does nothing."""
        self._owned.close()


class MarkovHead:
    """DSpark's Markov head as a ggml graph over the drafter's own tensors, where ggml shares them.

    `drafted` are the tokens of a draft vocabulary, None for all; `moves` the confidence head's sums
    after each token, None without one. Close it before the model.
    """

    def __init__(self, model: Model, *, n_threads: int = 0) -> None:
        self._graphs: dict[tuple[int, int], Graph] = {}
        self.device = ComputeDevice(device_for_heads(model), n_threads=n_threads)
        self._tensors = TargetTensors(model, self.device)
        self.drafted: IdRows | None = None
        self.moves: FloatRows | None = None
        names = {tensor.name for tensor in model.header.tensors}
        try:
            if VOCABULARY_MAP in names:
                self.drafted = read_numbers(model.path, VOCABULARY_MAP, np.int64)
            if CONFIDENCE in names:
                self.moves = self._confidence_moves()
            self._graph(1)
        except BaseException:
            self.close()
            raise

    def shifts(self, tokens: Sequence[int], before: int, numbers: IdRows | None) -> FloatRows:
        """Return the biases after each of n tokens less those after another, [n, drafted].

        With `numbers` of the drafted tokens of these numbers alone, [n, numbers].
        """
        n, width = len(tokens), filled_width(len(tokens))
        filled = np.array([*tokens, *[before] * (width - n)], np.int32)
        return self._less({"tokens": filled}, n, before, numbers)

    def _less(
        self, given: dict[str, Array], n: int, before: int, numbers: IdRows | None
    ) -> FloatRows:
        """Return the biases of the first n rows of an input, less those after a token."""
        [rows] = given.values()
        given["before"] = np.array([before], np.int32)
        if numbers is not None:
            given["numbers"] = numbers.astype(np.int32)
        graph = self._graph(len(rows), 0 if numbers is None else len(numbers))
        return graph.run(given)["shifts"][:n].astype(np.float32, copy=False)

    def _confidence_moves(self) -> FloatRows:
        """Return the confidence head's products with the embeddings of all tokens, [vocabulary]."""
        with closing(GraphBuilder(self.device, max_operations=4)) as builder:
            tokens = self._tensors.named(MARKOV)
            row = builder.get_rows(self._tensors.table(CONFIDENCE), builder.input("row", I32, 1))
            rank = tokens.shape[0]  # behind the weights of the slot's state
            weights = builder.columns(row, row.shape[0] - rank, rank)
            builder.output("moves", builder.mul_mat(tokens, weights))
            with closing(builder.build()) as graph:
                found = graph.run({"row": np.zeros(1, np.int32)})["moves"]
        return found.reshape(-1).astype(np.float32)

    def _graph(self, width: int, n_numbers: int = 0) -> Graph:
        graph = self._graphs.get((width, n_numbers))
        if graph is None:
            with closing(GraphBuilder(self.device, max_operations=8)) as builder:
                first, second = self._tensors.table(MARKOV), self._tensors.named(_MARKOV_OUT)
                states = self._latents(builder, first, width)
                # Both matrices are linear: the subtracted part need not be multiplied.
                own = builder.get_rows(first, builder.input("before", I32, 1))
                if n_numbers:
                    numbers = builder.input("numbers", I32, n_numbers)
                    second = builder.get_rows(self._tensors.table(_MARKOV_OUT), numbers)
                builder.output("shifts", builder.mul_mat(second, builder.sub(states, own)))
                graph = self._graphs[width, n_numbers] = builder.build()
        return graph

    def _latents(self, builder: GraphBuilder, first: Tensor, width: int) -> Tensor:
        """Return the inputs of the second matrix, of so many tokens."""
        return builder.get_rows(first, builder.input("tokens", I32, width))

    def close(self) -> None:
        """Free graphs and device; again does nothing."""
        while self._graphs:
            self._graphs.popitem()[1].close()
        self._tensors.close()
        self.device.close()


class LatentMarkovHead(MarkovHead):
    """A Markov head with a gate or a state: its small matrix lies in the file's metadata.

    Token, slot and state give a latent of `rank` numbers, worked out here; ggml
    multiplies it. References: deepseek-ai/DeepSpec, modeling/dspark/markov_head.py.
    """

    def __init__(self, kind: str, model: Model, *, n_threads: int = 0) -> None:
        self._kind = kind
        file = HeadFile(model.path, BLOCK_ARCHITECTURE)
        weight, bias = (np.array(file.numbers(key) or [], np.float32) for key in _LATENT_KEYS)
        self._rank = file.shape(MARKOV)[0]
        parts, own = (1, 1) if kind == "gated" else (3, 2)
        rows, width = parts * self._rank, model.n_embd + own * self._rank
        if weight.shape != (rows * width,) or bias.shape != (rows,):
            has = f"{file.path} has {weight.size} and {bias.size} numbers of a {kind} Markov head"
            raise MalformedFileError(f"{has}, and {rows * width} and {rows} are read")
        self._weight, self._bias = weight.reshape(rows, width), bias
        super().__init__(model, n_threads=n_threads)
        with closing(GraphBuilder(self.device, max_operations=2)) as builder:
            tokens = builder.input("tokens", I32, 1)
            builder.output("row", builder.get_rows(self._tensors.table(MARKOV), tokens))
            self._rows = builder.build()

    def started(self, last: int, hidden: FloatRows) -> FloatRows:
        """Return the state of a block before its first slot that predicts; `hidden`: of others."""
        state = np.zeros((1, self._rank), np.float32)
        for row in hidden:  # as in training, which begins with the block
            state = self.latents([last], state, row)[1]
        first: FloatRows = state[0]
        return first

    def latents(
        self, tokens: Sequence[int], states: FloatRows, hidden: FloatRows
    ) -> tuple[FloatRows, FloatRows]:
        """Return the latents after n tokens, and the states then, both [n, rank]."""
        embedded = np.stack([self._embedded(token) for token in tokens])
        slot = np.broadcast_to(hidden, (len(tokens), len(hidden)))
        if self._kind == "gated":
            read = np.concatenate([slot, embedded], axis=1)
            return _sigmoid(read @ self._weight.T + self._bias) * embedded, states
        read = np.concatenate([states, embedded, slot], axis=1)
        gate, candidate, output = np.split(read @ self._weight.T + self._bias, 3, axis=1)
        share = _sigmoid(gate)
        return np.tanh(output), share * states + (1.0 - share) * np.tanh(candidate)

    def biases(self, latents: FloatRows, before: int, numbers: IdRows | None) -> FloatRows:
        """Return the biases of latents [n, rank] less those that llama.cpp added, [n, drafted]."""
        n = len(latents)
        filled = np.zeros((filled_width(n), self._rank), np.float32)
        filled[:n] = latents
        return self._less({"latents": filled}, n, before, numbers)

    def _embedded(self, token: int) -> FloatRows:
        row = self._rows.run({"tokens": np.array([token], np.int32)})["row"]
        found: FloatRows = row.reshape(-1).astype(np.float32)
        return found

    def _latents(self, builder: GraphBuilder, first: Tensor, width: int) -> Tensor:
        return builder.input("latents", F32, self._rank, width)

    def close(self) -> None:
        """Free graphs and device; again does nothing."""
        rows = self.__dict__.pop("_rows", None)
        if rows is not None:
            rows.close()
        super().close()


def _sigmoid(x: FloatRows) -> FloatRows:
    found: FloatRows = 0.5 + 0.5 * np.tanh(0.5 * x)
    return found
