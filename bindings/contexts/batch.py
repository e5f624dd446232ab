"""A batch of tokens for one evaluation (llama_batch), filled through numpy views of its memory."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.library import llama

IntArray = npt.NDArray[np.int32]
FlagArray = npt.NDArray[np.int8]
Ints = Sequence[int] | IntArray


@dataclass(frozen=True, slots=True, eq=False)
class BatchShape:
    """All of a batch but its tokens and its first position, worked out once for many evaluations.

    Token i is `depths[i]` positions behind the first. `id_counts[i]` of the flat `ids` are its
    sequences; `outputs[i]` is whether it gives a row.
    """

    depths: tuple[int, ...]
    id_counts: IntArray
    ids: IntArray
    outputs: FlagArray
    offsets: npt.NDArray[np.uintp]
    """The offset of each token's ids, in bytes."""
    n_outputs: int
    fewest_ids: int
    id_bounds: tuple[int, int]

    @staticmethod
    def of(
        depths: Sequence[int], ids: Sequence[Sequence[int]], outputs: Sequence[int]
    ) -> BatchShape:
        """Return the shape of tokens of these depths, each in its sequences `ids[i]`."""
        counts = [*map(len, ids)]
        flat = [*chain.from_iterable(ids)]
        starts = accumulate(counts[:-1], initial=0) if counts else ()
        return BatchShape(
            tuple(depths),
            np.array(counts, np.int32),
            np.array(flat, np.int32),
            np.array(outputs, np.int8),
            np.array([*starts], np.uintp) * np.uintp(np.dtype(np.int32).itemsize),
            sum(map(bool, outputs)),
            min(counts, default=0),
            (min(flat, default=0), max(flat, default=0)),
        )

    @staticmethod
    def beside(shapes: Sequence[BatchShape]) -> BatchShape:
        """Return the shape of tokens in these shapes, one after the other in the batch."""
        counts = np.concatenate([shape.id_counts for shape in shapes])
        bounds = [bound for shape in shapes for bound in shape.id_bounds]
        depths = (*chain.from_iterable(shape.depths for shape in shapes),)
        starts = np.cumsum(counts, dtype=np.int64) - counts
        return BatchShape(
            depths,
            counts,
            np.concatenate([shape.ids for shape in shapes]),
            np.concatenate([shape.outputs for shape in shapes]),
            starts.astype(np.uintp) * np.uintp(np.dtype(np.int32).itemsize),
            sum(shape.n_outputs for shape in shapes),
            min(shape.fewest_ids for shape in shapes),
            (min(bounds), max(bounds)),
        )


@functools.lru_cache(maxsize=256)
def shapes_beside(shapes: tuple[BatchShape, ...]) -> BatchShape:
    """Return `BatchShape.beside` of the shapes, the same object for the same shapes."""
    return BatchShape.beside(shapes)


@functools.lru_cache(maxsize=64)
def chain_shape(n: int, ids: tuple[int, ...], n_outputs: int) -> BatchShape:
    """Return the shape of n tokens one after the other, all in `ids`; the last ones give rows."""
    return BatchShape.of(range(n), [ids] * n, [*[0] * (n - n_outputs), *[1] * n_outputs])


class Batch:
    """Tokens, positions, sequence ids and output flags of up to `capacity` tokens.

    A token may carry several sequence ids: it is then seen by all of them. That is how a tree of
    guesses becomes one evaluation (each root-to-leaf path is a sequence).
    """

    def __init__(self, capacity: int, max_ids_per_token: int) -> None:
        if capacity < 1 or max_ids_per_token < 1:
            raise OptionError("a batch needs room for at least one token and one sequence id")
        self.capacity = capacity
        self.max_ids = capacity * max_ids_per_token
        self.tokens = np.zeros(capacity, np.int32)
        self.positions = np.zeros(capacity, np.int32)
        self.id_counts = np.zeros(capacity, np.int32)
        self.outputs = np.zeros(capacity, np.int8)
        self.ids = np.zeros(self.max_ids, np.int32)
        self._offsets = np.zeros(capacity, np.int64)
        # llama_batch.seq_id is an array of pointers into `ids`, kept as plain integers.
        self._pointers = np.zeros(capacity + 1, np.uintp)
        # Writing through these takes a fraction of the time of an array's own assignment.
        self._token_cells, self._position_cells = self.tokens.data, self.positions.data
        self._ids_address = self.ids.ctypes.data
        self._ids_start = np.uintp(self._ids_address)
        self.n_tokens = 0
        self.n_outputs = 0
        # The owner of the ids and flags that are filled in: a shape, or a single token's sequence.
        self._filled: BatchShape | int | None = None
        # The context that checked the contents, but for tokens and positions.
        self.checked_by: object = None
        # Bounds of the contents: the context checks a batch without walking it again.
        self.token_bounds = (0, 0)
        self.id_bounds = (0, 0)
        self.first_position = 0
        # The native `llama_batch`, describing the first `n_tokens` entries.
        self.struct: Any = llama().llama_batch()
        self._point(token=self.tokens, pos=self.positions, n_seq_id=self.id_counts)
        self._point(seq_id=self._pointers, logits=self.outputs)
        self.address, self.n_bytes = ctypes.addressof(self.struct), ctypes.sizeof(self.struct)

    def _point(self, **arrays: npt.NDArray[Any]) -> None:
        """Let fields of the native batch point to these arrays."""
        kinds = dict(self.struct._fields_)
        for name, pointed in arrays.items():
            setattr(self.struct, name, ctypes.cast(pointed.ctypes.data, kinds[name]))

    def fill(
        self,
        tokens: Ints,
        positions: Ints,
        id_counts: Ints,
        ids: Ints,
        outputs: Sequence[int] | FlagArray,
    ) -> None:
        """Write n tokens; `id_counts[n]` of the flat `ids` belong to each in turn."""
        n = len(tokens)
        if not 0 < n <= self.capacity:
            raise OptionError(f"{n} tokens in a batch for 1 to {self.capacity}")
        if not (len(positions) == len(outputs) == len(id_counts) == n):
            raise OptionError("a batch's tokens, positions, id counts and outputs differ in length")
        self._filled = None
        self.tokens[:n] = tokens
        self.positions[:n] = positions
        self.token_bounds = _bounds(tokens)
        self.first_position = _bounds(positions)[0]
        self.checked_by = None
        if len(ids) > self.max_ids:
            raise OptionError(f"{len(ids)} sequence ids in a batch for {self.max_ids}")
        counts = self.id_counts[:n]
        counts[:] = id_counts
        if counts.min() < 1 or int(counts.sum()) != len(ids):
            raise OptionError("a token needs at least one sequence id, and none may be left over")
        self.ids[: len(ids)] = ids
        self.id_bounds = _bounds(ids)
        offsets = self._offsets[:n]
        np.cumsum(counts, out=offsets)
        offsets -= counts
        offsets *= self.ids.itemsize
        offsets += self._ids_address
        self._pointers[:n] = offsets
        self.outputs[:n] = outputs
        self._set_size(n, int(np.count_nonzero(self.outputs[:n])))

    def fill_shape(self, tokens: Ints, start: int, shape: BatchShape) -> None:
        """Write tokens in a shape that begins at position `start`.

        Rounds repeat their shapes: only tokens and positions are written then.
        """
        if shape is not self._filled:
            self._change_shape(shape)
        if len(tokens) != len(shape.depths):
            raise OptionError(f"{len(tokens)} tokens in a shape for {len(shape.depths)}")
        self.token_bounds = self._fill_cells(0, tokens, start, shape.depths)
        self.first_position = start

    def fill_shapes(self, parts: Sequence[tuple[Sequence[int], int, BatchShape]]) -> None:
        """Write several texts' tokens side by side, each in its shape from its position on."""
        shape = shapes_beside(tuple(shape for _, _, shape in parts))
        if shape is not self._filled:
            self._change_shape(shape)
        given, n = [len(tokens) for tokens, _, _ in parts], [len(own.depths) for *_, own in parts]
        if given != n:
            raise OptionError(f"{given} tokens in shapes for {n}")
        first, bounds = 0, list[int]()
        for tokens, start, own in parts:
            bounds += self._fill_cells(first, tokens, start, own.depths)
            first += len(own.depths)
        self.token_bounds = min(bounds), max(bounds)
        self.first_position = min(start for _, start, _ in parts)

    def _fill_cells(
        self, first: int, tokens: Ints, start: int, depths: Sequence[int]
    ) -> tuple[int, int]:
        """Write tokens, and positions `start` + `depths`, from place `first` on.

        Returns the lowest and the highest token. Raises OverflowError for numbers of more than 32
        bits, before anything is written.
        """
        places = slice(first, first + len(depths))
        cells = array("i", [*tokens]), array("i", [start + depth for depth in depths])
        self._token_cells[places], self._position_cells[places] = cells
        return int(min(tokens)), int(max(tokens))

    def _change_shape(self, shape: BatchShape) -> None:
        n, n_ids = len(shape.depths), len(shape.ids)
        if not 0 < n <= self.capacity:
            raise OptionError(f"{n} tokens in a batch for 1 to {self.capacity}")
        if n_ids > self.max_ids:
            raise OptionError(f"{n_ids} sequence ids in a batch for {self.max_ids}")
        if shape.fewest_ids < 1:
            raise OptionError("a token needs at least one sequence id")
        # The owner is set last: Ctrl-C may come on any line.
        self._filled = self.checked_by = None
        self.id_counts[:n] = shape.id_counts
        self.ids[:n_ids] = shape.ids
        self.outputs[:n] = shape.outputs
        np.add(shape.offsets, self._ids_start, out=self._pointers[:n])
        self._set_size(n, shape.n_outputs)
        self.id_bounds = shape.id_bounds
        self._filled = shape

    def _set_size(self, n_tokens: int, n_outputs: int) -> None:
        self.struct.n_tokens = self.n_tokens = n_tokens
        self.n_outputs = n_outputs

    def tokens_by_sequence(self) -> dict[int, int]:
        """Return how many tokens each sequence has."""
        low, high = self.id_bounds
        if low == high:
            return {low: self.n_tokens}
        ids = self.ids[: int(self.id_counts[: self.n_tokens].sum())]
        return dict(enumerate(np.bincount(ids - low).tolist(), low))

    def layout(self) -> tuple[bytes, ...]:
        """Return the key of a batch but for tokens and positions: ids and output flags."""
        counts = self.id_counts[: self.n_tokens]
        ids = self.ids[: int(counts.sum())]
        return counts.tobytes(), ids.tobytes(), self.outputs[: self.n_tokens].tobytes()

    def fill_one(self, token: int, position: int, sequence: int = 0) -> None:
        """Write a single token with output: the step a draft model takes most."""
        self._token_cells[0] = token
        self._position_cells[0] = position
        self.first_position = position
        self.token_bounds = (token, token)
        if self._filled == sequence:  # as a chain goes on, the rest is in place already
            return
        self._filled = self.checked_by = None
        self.id_counts[0] = 1
        self.outputs[0] = 1
        self.ids[0] = sequence
        self._pointers[0] = self._ids_address
        self._set_size(1, 1)
        self.id_bounds = (sequence, sequence)
        self._filled = sequence

    def fill_chain(self, tokens: Ints, start: int, ids: Ints, n_outputs: int) -> None:
        """Write tokens from position `start` on, all in `ids`; the last `n_outputs` give rows."""
        self.fill_shape(tokens, start, chain_shape(len(tokens), tuple(ids), n_outputs))


def _bounds(values: Ints) -> tuple[int, int]:
    """Return lowest and highest value; on a tree's few tokens Python is quicker than numpy."""
    if isinstance(values, np.ndarray):
        return int(values.min()), int(values.max())
    return min(values), max(values)
