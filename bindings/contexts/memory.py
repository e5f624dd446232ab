"""The KV cache of a context (llama_memory): cached positions of sequences, and saved ones."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.direct_calls import direct_call
from specrun.bindings.errors import (
    ClosedError,
    MalformedFileError,
    OptionError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.functions import call
from specrun.bindings.library import last_native_errors, llama

if TYPE_CHECKING:
    from specrun.bindings.contexts.context import Context


# == The cache =====================================================================================
#
# Every call walks all cells of the cache in llama.cpp (about 3.4 ns a cell), so callers touch few
# ranges. All arguments are checked first: llama.cpp asserts, and an assertion ends the Python
# process.


ALL_SEQUENCES = -1

Moves = Sequence[tuple[int, int, bool]]
"""Of each a sequence, how many positions it shares already, and whether it strays from there."""


class Memory:
    """Truncate, branch, keep and clear cached positions; owned by its `Context`.

    A recurrent state cannot drop positions but for a few of the last evaluation (`n_rollback`).
    `checkpoints` are earlier states of its sequences, to which `return_to` goes back. `spare` is a
    sequence that holds one earlier state of sequence 0 (`hold`, `return_to_held`), None without.
    """

    def __init__(
        self,
        native: Any,  # noqa: ANN401 - the ctypes module
        handle: Any,  # noqa: ANN401 - a ctypes pointer
        *,
        n_sequences: int,
        can_branch: bool,
        unified: bool,
        n_rollback: int = 0,
        checkpoints: Checkpoints | None = None,
        spare: int | None = None,
    ) -> None:
        self._native = native
        # A round makes dozens of these two calls: looking them up in the module would show.
        self._remove, self._share = native.llama_memory_seq_rm, native.llama_memory_seq_cp
        if native is llama():  # a stand-in for the library is called itself
            self._remove = direct_call("llama_memory_seq_rm")
            self._share = direct_call("llama_memory_seq_cp")
        self._open_handle: Any = handle
        self._n_sequences = n_sequences
        self._can_branch = can_branch
        self._unified = unified
        self.n_rollback = n_rollback  # the most tokens that a recurrent state can take back at once
        # How many tokens the recurrent state of each sequence can take back now.
        self._may_take_back: Mapping[int, int] = {}
        self.checkpoints = checkpoints
        self.spare = spare

    @property
    def _handle(self) -> Any:  # noqa: ANN401 - a ctypes pointer
        handle = self._open_handle  # read once: another thread may close it
        if handle is None:
            raise ClosedError("the context of this memory is closed")
        return handle

    def close(self) -> None:
        """Forget the native memory, which is the context's."""
        self._open_handle = None
        if self.checkpoints is not None:
            self.checkpoints.close()

    def note_evaluation(self, n_tokens: Mapping[int, int]) -> None:
        """Note how many tokens of each sequence were evaluated last: their states may return.

        The earlier states of other sequences are lost: llama.cpp may have moved their cells.
        """
        most = self.n_rollback
        self._may_take_back = {each: min(most, n - 1) for each, n in n_tokens.items()}

    def truncate(self, start: int, end: int = -1, sequence: int = ALL_SEQUENCES) -> None:
        """Drop positions start <= p < end (-1: to the end) of one sequence, or of all of them.

        Raises `UnsupportedModelError` if the memory cannot drop a part: recurrent and hybrid
        models take back, once, tokens of the last evaluation at most, and only some of them.
        """
        if not ALL_SEQUENCES <= sequence < self._n_sequences:
            self._check_sequence(sequence)
        if start < 0:
            raise OptionError(f"cannot truncate from position {start}: it is negative")
        if not self._can_branch and start > 0:
            sequences = range(self._n_sequences) if sequence == ALL_SEQUENCES else (sequence,)
            for seq_id in sequences:
                self._take_back(seq_id, start, end)
            return
        if not self._can_branch:
            self._forget_states(sequence, start)
        if self.spare is not None:  # its states would keep cells in use
            self._remove(self._handle, self.spare, 0, -1)
        if not self._remove(self._open_handle or self._handle, sequence, start, end):
            problem = f"llama.cpp cannot drop positions from {start} on of this memory"
            raise UnsupportedModelError(problem)

    def _take_back(self, sequence: int, start: int, end: int) -> None:
        """Drop the positions from `start` on, or raise if the state cannot take back that many."""
        last = self.last_position(sequence)
        if last < start:
            return
        most = self._may_take_back.get(sequence, 0)
        possible = last - start + 1 <= most and not 0 <= end <= last
        self._forget_states(sequence, start)
        if not possible or not self._remove(self._handle, sequence, start, -1):
            raise UnsupportedModelError("this architecture's memory cannot drop these positions")

    def _forget_states(self, sequence: int, start: int) -> None:
        """Forget the states of a sequence, or of all, that saw more than `start` tokens."""
        # llama.cpp takes back once: steps do not add up.
        self._may_take_back = (
            {}
            if sequence == ALL_SEQUENCES
            else {own: n for own, n in self._may_take_back.items() if own != sequence}
        )
        if self.checkpoints is not None:
            self.checkpoints.forget(sequence, start)

    def note_checkpoint(self, sequence: int = 0) -> None:
        """Copy the state of a sequence, as it is now, if there are checkpoints."""
        if self.checkpoints is not None:
            self.checkpoints.take(sequence, self.last_position(sequence) + 1)

    def returns_to(self, length: int, sequence: int = 0) -> int:
        """Return how many tokens `return_to` would leave of a sequence; it changes nothing."""
        n_tokens = self.last_position(sequence) + 1
        if n_tokens - length <= self._may_take_back.get(sequence, 0):
            return min(length, n_tokens)
        return 0 if self.checkpoints is None else self.checkpoints.newest(sequence, length)

    def return_to(self, length: int, sequence: int = 0) -> int:
        """Keep no more than `length` tokens of a recurrent sequence; return how many there are.

        It takes back tokens of the last evaluation if it can, returns to the latest checkpoint that
        is not behind `length`, or else drops the whole sequence.
        """
        left = self.returns_to(length, sequence)
        n_taken_back = self.last_position(sequence) + 1 - left
        if left and n_taken_back <= self._may_take_back.get(sequence, 0):
            self.truncate(left, -1, sequence)
            return left
        if left and self.checkpoints is not None and self.checkpoints.place(sequence, left):
            self._forget_states(sequence, left)
            # The state is that of the checkpoint: only keys and values lie behind it.
            if self._remove(self._handle, sequence, left, -1):
                return left
        self.truncate(0, -1, sequence)
        return 0

    def hold(self) -> None:
        """Hold sequence 0 as it is now; the state held before is dropped.

        The next evaluation of the sequence leaves its state and takes another cell.
        """
        self._remove(self._handle, self.spare, 0, -1)
        self._share(self._handle, 0, self.spare, 0, -1)

    def return_to_held(self) -> None:
        """Let sequence 0 be as it was when it was held last."""
        self._remove(self._handle, 0, 0, -1)
        self._share(self._handle, self.spare, 0, 0, -1)

    def branch(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Let sequence `target` share the cached positions start <= p < end of `source`."""
        most = self._n_sequences
        if not (0 <= source < most and 0 <= target < most):
            self._check_sequence(source)
            self._check_sequence(target)
        if not self._can_branch or (not self._unified and source != target):
            raise UnsupportedModelError("sequences of this memory cannot share positions")
        self._share(self._open_handle or self._handle, source, target, start, end)

    def follow(self, source: int, first: int, end: int, moves: Moves) -> None:
        """Let sequences share missing cells of the positions first <= p < end of `source`.

        Other cells, to which they stray, are dropped. Moves are in the order of their sequences. A
        tree of a dozen leaves makes two dozen calls: they are checked once.
        """
        for sequence in (source, moves[0][0], moves[-1][0]):
            self._check_sequence(sequence)
        if first < 0:
            raise OptionError(f"cannot truncate from position {first}: it is negative")
        if not (self._can_branch and self._unified):
            raise UnsupportedModelError("sequences of this memory cannot share positions")
        remove, share, handle = self._remove, self._share, self._handle
        for sequence, shared, strays in moves:
            start = first + shared
            # First, or the path would be attended to beside another branch's cells.
            if strays and not remove(handle, sequence, start, end):
                problem = f"llama.cpp cannot drop positions from {start} on of this memory"
                raise UnsupportedModelError(problem)
            share(handle, source, sequence, start, end)

    def keep(self, sequence: int) -> None:
        """Drop every other sequence."""
        self._check_sequence(sequence)
        for other in range(self._n_sequences):
            if other != sequence:
                self._forget_states(other, 0)
        self._native.llama_memory_seq_keep(self._handle, sequence)

    def clear(self) -> None:
        """Drop everything."""
        self._forget_states(ALL_SEQUENCES, 0)
        self._native.llama_memory_clear(self._handle, True)

    def last_position(self, sequence: int = 0) -> int:
        """Return the highest cached position of a sequence, -1 if it is empty."""
        self._check_sequence(sequence)
        return int(self._native.llama_memory_seq_pos_max(self._handle, sequence))

    def first_position(self, sequence: int = 0) -> int:
        """Return the lowest cached position of a sequence, -1 if it is empty."""
        self._check_sequence(sequence)
        return int(self._native.llama_memory_seq_pos_min(self._handle, sequence))

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self._n_sequences:
            there = f"0 to {self._n_sequences - 1} of this context"
            raise OptionError(f"sequence {sequence} is outside {there}")


# == Saved sequences: cached positions, written to a file or to memory, and read again =============
#
# llama.cpp's own form (`llama_state_seq_save_file`, `llama_state_seq_get_data`). It checks little
# of the data that it reads: give it only data that was verified to be as it was written. Cells are
# written in the order in which they lie, and read into free cells in that order, bit for bit.


_STATE_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: without keys and values


def sequence_bytes(context: Context) -> int:
    """Return how many bytes the cached positions of sequence 0 take in a file, nearly."""
    return int(call("llama_state_seq_get_size")(context.handle, 0))


def save_sequence(context: Context, tokens: list[int], path: Path) -> None:
    """Write the cached positions of sequence 0, which are those of `tokens`."""
    ids, save = np.asarray(tokens, np.int32), call("llama_state_seq_save_file")
    last_native_errors()
    if not save(context.handle, bytes(path), 0, ids.ctypes.data, len(ids)):
        raise SpecrunError(f"the cache of {len(ids):,} tokens cannot be saved: {_reason()}")


def load_sequence(context: Context, path: Path) -> list[int]:
    """Read positions into every sequence of an empty context; return their tokens.

    Raises MalformedFileError, and the context is empty, if they are not of such a context.
    """
    ids, count = np.zeros(context.n_ctx, np.int32), ctypes.c_size_t(0)
    load, there = call("llama_state_seq_load_file"), ctypes.byref(count)
    last_native_errors()
    context.memory.clear()
    if not load(context.handle, bytes(path), 0, ids.ctypes.data, len(ids), there):
        context.memory.clear()
        raise MalformedFileError(f"{path} does not fit this context: {_reason()}")
    for sequence in range(1, context.options.n_sequences):
        context.memory.branch(0, sequence)
    return [int(token) for token in ids[: count.value]]


def copy_sequence(
    context: Any,  # noqa: ANN401 - a context, or its ctypes pointer
    sequence: int,
    *,
    state_only: bool = False,
) -> npt.NDArray[np.uint8]:
    """Return a copy of the cached positions of a sequence, in bytes; perhaps of its state alone.

    A memory without keys and values is all state.
    """
    handle, flags = getattr(context, "handle", context), _STATE_ONLY if state_only else 0
    size = call("llama_state_seq_get_size_ext")(handle, sequence, flags)
    data, copy = np.empty(int(size), np.uint8), call("llama_state_seq_get_data_ext")
    last_native_errors()
    if copy(handle, data.ctypes.data, len(data), sequence, flags) != len(data):
        raise SpecrunError(f"the cache of sequence {sequence} cannot be copied: {_reason()}")
    return data


def place_sequence(
    context: Any,  # noqa: ANN401 - a context, or its ctypes pointer
    data: npt.NDArray[np.uint8],
    sequence: int,
    *,
    state_only: bool = False,
) -> None:
    """Give a sequence of the context the positions that `copy_sequence` returned, in free cells."""
    handle, flags = getattr(context, "handle", context), _STATE_ONLY if state_only else 0
    place = call("llama_state_seq_set_data_ext")
    last_native_errors()
    if place(handle, data.ctypes.data, len(data), sequence, flags) != len(data):
        raise SpecrunError(f"the cache of sequence {sequence} cannot be placed: {_reason()}")


def _reason() -> str:
    return last_native_errors() or "llama.cpp gives no reason"


# == Checkpoints: copies of recurrent states =======================================================


class Checkpoints:
    """Copies of recurrent states of a context's sequences, of at most `budget` bytes together.

    Each is the state after the first tokens of a sequence, whose keys and values stay in the
    cache. The least recently used ones are dropped first. They lie in this machine's memory.
    """

    def __init__(self, context: Any, budget: int) -> None:  # noqa: ANN401 - a ctypes pointer
        self._context = context
        self.budget = budget
        # By sequence and number of tokens, the least recently used first.
        self._kept: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}

    @property
    def n_bytes(self) -> int:
        """The bytes that they take; sequences may share one."""
        return sum({id(data): len(data) for data in self._kept.values()}.values())

    def lengths(self, sequence: int = 0) -> list[int]:
        """Return after how many tokens of a sequence there are checkpoints, in ascending order."""
        return sorted(length for own, length in self._kept if own == sequence)

    def newest(self, sequence: int, length: int) -> int:
        """Return the most tokens of a checkpoint that is not behind `length`, 0 if none is."""
        return max((n for n in self.lengths(sequence) if n <= length), default=0)

    def take(self, sequence: int, n_tokens: int) -> None:
        """Keep the state of a sequence, which has so many tokens now, if there is room for it."""
        known = self._kept.pop((sequence, n_tokens), None)
        if known is None and n_tokens:
            known = copy_sequence(self._context, sequence, state_only=True)
        if known is not None:
            self.add(sequence, n_tokens, known)

    def add(self, sequence: int, n_tokens: int, data: npt.NDArray[np.uint8]) -> None:
        """Keep a copy of the state after so many tokens of a sequence, if there is room for it."""
        if len(data) > self.budget:
            return
        while self._kept and self.n_bytes + len(data) > self.budget:
            del self._kept[next(iter(self._kept))]
        self._kept[sequence, n_tokens] = data

    def copies(self, sequence: int = 0) -> list[tuple[int, npt.NDArray[np.uint8]]]:
        """Return those of a sequence by their numbers of tokens, least recently used first."""
        return [(length, data) for (own, length), data in self._kept.items() if own == sequence]

    def place(self, sequence: int, n_tokens: int) -> bool:
        """Put a checkpoint into its sequence; returns False, and nothing is known, if it fails."""
        data = self._kept.pop((sequence, n_tokens))
        try:
            place_sequence(self._context, data, sequence, state_only=True)
        except SpecrunError:
            return False
        self._kept[sequence, n_tokens] = data
        return True

    def share(self, source: int, target: int) -> None:
        """Let a sequence that was copied from another have its checkpoints, too."""
        for length in self.lengths(source):
            self._kept[target, length] = self._kept[source, length]

    def forget(self, sequence: int, length: int) -> None:
        """Drop those of a sequence, or of all, that saw more than `length` tokens."""
        for own, n_tokens in list(self._kept):
            if sequence in (own, ALL_SEQUENCES) and n_tokens > length:
                del self._kept[own, n_tokens]

    def close(self) -> None:
        """Drop all; no state can be copied any more."""
        self._kept.clear()
        self._context = None
