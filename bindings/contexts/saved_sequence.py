"""Saved sequences: cached positions of a context, written to a file or to memory, and read again.

llama.cpp's own form (`llama_state_seq_save_file`, `llama_state_seq_get_data`). It checks little of
the data that it reads: give it only data that was verified to be as it was written. Cells are
written in the order in which they lie, and read into free cells in that order, bit for bit.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import MalformedFileError, SpecrunError
from specrun.bindings.library import last_native_errors, native_function

_pointer, _size, _text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
_SEQUENCE = ctypes.c_int32


def sequence_bytes(context: Context) -> int:
    """Return how many bytes the cached positions of sequence 0 take in a file, nearly."""
    size = native_function("llama_state_seq_get_size", _size, _pointer, _SEQUENCE)
    return int(size(context.handle, 0))


def save_sequence(context: Context, tokens: list[int], path: Path) -> None:
    """Write the cached positions of sequence 0, which are those of `tokens`."""
    ids = np.asarray(tokens, np.int32)
    kinds = _pointer, _text, _SEQUENCE, _pointer, _size
    save = native_function("llama_state_seq_save_file", _size, *kinds)
    last_native_errors()
    if not save(context.handle, bytes(path), 0, ids.ctypes.data, len(ids)):
        reason = last_native_errors() or "llama.cpp does not say why"
        raise SpecrunError(f"the cache of {len(ids):,} tokens cannot be saved: {reason}")


def load_sequence(context: Context, path: Path) -> list[int]:
    """Read positions into every sequence of an empty context; return their tokens.

    Raises MalformedFileError, and the context is empty, where they are not of such a context.
    """
    ids, count = np.zeros(context.n_ctx, np.int32), _size(0)
    kinds = _pointer, _text, _SEQUENCE, _pointer, _size, _pointer
    load = native_function("llama_state_seq_load_file", _size, *kinds)
    last_native_errors()
    context.memory.clear()
    there = ctypes.byref(count)
    if not load(context.handle, bytes(path), 0, ids.ctypes.data, len(ids), there):
        context.memory.clear()
        reason = last_native_errors() or "llama.cpp does not say why"
        raise MalformedFileError(f"{path} does not fit this context: {reason}")
    for sequence in range(1, context.options.n_sequences):
        context.memory.branch(0, sequence)
    return [int(token) for token in ids[: count.value]]


def copy_sequence(context: Context, sequence: int) -> npt.NDArray[np.uint8]:
    """Return a copy of the cached positions of a sequence, in bytes."""
    size = native_function("llama_state_seq_get_size", _size, _pointer, _SEQUENCE)
    data = np.empty(int(size(context.handle, sequence)), np.uint8)
    kinds = _pointer, _pointer, _size, _SEQUENCE
    copy = native_function("llama_state_seq_get_data", _size, *kinds)
    last_native_errors()
    if copy(context.handle, data.ctypes.data, len(data), sequence) != len(data):
        reason = last_native_errors() or "llama.cpp does not say why"
        raise SpecrunError(f"the cache of sequence {sequence} cannot be copied: {reason}")
    return data


def place_sequence(context: Context, data: npt.NDArray[np.uint8], sequence: int) -> None:
    """Give a sequence of the context the positions that `copy_sequence` returned, in free cells."""
    kinds = _pointer, _pointer, _size, _SEQUENCE
    place = native_function("llama_state_seq_set_data", _size, *kinds)
    last_native_errors()
    if place(context.handle, data.ctypes.data, len(data), sequence) != len(data):
        reason = last_native_errors() or "llama.cpp does not say why"
        raise SpecrunError(f"the cache of sequence {sequence} cannot be placed: {reason}")
