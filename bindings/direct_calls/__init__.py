"""Calls of llama.cpp's small functions, compiled if there was a compiler at the installation.

Each makes a callable of the function's own arguments, compiled or by ctypes: both do the same. A
round makes a handful of such calls right after an evaluation, when ctypes and its conversions are
no longer in the processor's caches and take many times as long as they do elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from specrun.bindings.functions import call
from specrun.bindings.library import address_of

Step = Callable[[int, int, int], tuple[int, float, int]]
"""Of a context, a token and a position: llama.cpp's code, seconds, the address of the logits."""

_PIECE_SIZE = 64  # longer ones are rare


class DirectCalls(Protocol):
    """The compiled functions. Each takes the address of llama.cpp's before its arguments."""

    def address(self, function: int, subject: int) -> int:
        """Return the address that a function gives for a context."""

    def remove(self, function: int, memory: int, sequence: int, start: int, end: int) -> bool:
        """Drop cached positions of a sequence."""

    def share(self, function: int, memory: int, source: int, target: int, *places: int) -> None:
        """Share cached positions of a sequence with another."""

    def piece(self, function: int, vocabulary: int, token: int, special: bool) -> bytes:
        """Return the bytes of a token."""

    BATCH_BYTES: int
    """Bytes of llama.cpp's batch, as `step` reads it."""

    def step(
        self,
        decode: int,
        logits: int,
        synchronize: int,
        batch: int,
        context: int,
        token: int,
        position: int,
    ) -> tuple[int, float, int]:
        """Evaluate a batch of one token; return code, seconds and the address of its logits."""


def _load() -> DirectCalls | None:
    try:
        found = importlib.import_module("specrun.bindings.direct_calls._calls")
    except ImportError:
        return None
    # Of a checkout that was compiled before it was brought up to date.
    wanted = [name for name in vars(DirectCalls) if not name.startswith("_")]
    wanted += DirectCalls.__annotations__
    return cast(DirectCalls, found) if all(hasattr(found, name) for name in wanted) else None


CALLS = _load()
"""The calls, None if they were not compiled."""


def address_function(name: str) -> Callable[[int], int | None]:
    """Return the function for the address of a context's rows; none is 0 or None."""
    found: Callable[[int], int | None] = _function(name, "address")
    return found


def remove_function() -> Callable[[int, int, int, int], bool]:
    """Return llama_memory_seq_rm: of a memory, a sequence (-1: all), from a position to another."""
    found: Callable[[int, int, int, int], bool] = _function("llama_memory_seq_rm", "remove")
    return found


def share_function() -> Callable[[int, int, int, int, int], None]:
    """Return llama_memory_seq_cp: of a memory, from a sequence to another, and the positions."""
    found: Callable[..., None] = _function("llama_memory_seq_cp", "share")
    return found


def _function(name: str, compiled: str) -> Any:  # noqa: ANN401 - a function
    """Return a function by its compiled call, or else by ctypes."""
    if CALLS is None:
        return call(name)
    return functools.partial(getattr(CALLS, compiled), address_of(name))


def step_function(batch: int, n_bytes: int, *, synchronizes: bool) -> Step | None:
    """Return a call that evaluates a batch of one token of a context, given with its position.

    None if it was not compiled, or for batches of another size than llama.cpp's.
    """
    if CALLS is None or n_bytes != CALLS.BATCH_BYTES:
        return None
    decode, logits = address_of("llama_decode"), address_of("llama_get_logits")
    synchronize = address_of("llama_synchronize") if synchronizes else 0
    return functools.partial(CALLS.step, decode, logits, synchronize, batch)


def piece_function() -> Callable[[int, int, bool], bytes]:
    """Return the function for the bytes of a token, special tokens by name or not at all."""
    write = _function("llama_token_to_piece", "piece")
    if CALLS is not None:
        found: Callable[[int, int, bool], bytes] = write
        return found

    def piece(vocabulary: int, token: int, special: bool) -> bytes:
        buffer, size = ctypes.create_string_buffer(_PIECE_SIZE), _PIECE_SIZE
        count = write(vocabulary, token, buffer, size, 0, special)
        if count < 0:
            buffer, size = ctypes.create_string_buffer(-count), -count
            count = write(vocabulary, token, buffer, size, 0, special)
        return buffer.raw[:count]

    return piece
