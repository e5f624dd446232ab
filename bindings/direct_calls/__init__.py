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
from typing import Any

from specrun.bindings.functions import call
from specrun.bindings.library import address_of

Step = Callable[[int, int, int], tuple[int, float, int]]
"""Of a context, a token and a position: llama.cpp's code, seconds, the address of the logits."""

NAMES = ("address", "remove", "share", "piece", "step", "BATCH_BYTES")
"""The compiled functions, and the bytes of llama.cpp's batch as `step` reads it."""
_COMPILED = {"llama_memory_seq_rm": "remove", "llama_memory_seq_cp": "share"}
_COMPILED["llama_token_to_piece"] = "piece"
_PIECE_SIZE = 64  # longer ones are rare


def _load() -> Any:  # noqa: ANN401 - a compiled module
    try:
        found = importlib.import_module("specrun.bindings.direct_calls._calls")
    except ImportError:
        return None
    # Of a checkout that was compiled before it was brought up to date.
    return found if all(hasattr(found, name) for name in NAMES) else None


CALLS = _load()
"""The calls, None if they were not compiled."""


def direct_call(name: str) -> Callable[..., Any]:
    """Return a function by its compiled call, or else by ctypes.

    It is one of llama.cpp's for the address of a context's rows (0 or None for none), or of
    llama_memory_seq_rm, llama_memory_seq_cp and llama_token_to_piece.
    """
    if CALLS is None:
        found: Callable[..., Any] = call(name)
        return found
    return functools.partial(getattr(CALLS, _COMPILED.get(name, "address")), address_of(name))


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
    write = direct_call("llama_token_to_piece")
    if CALLS is not None:
        return write

    def piece(vocabulary: int, token: int, special: bool) -> bytes:
        buffer, size = ctypes.create_string_buffer(_PIECE_SIZE), _PIECE_SIZE
        count = write(vocabulary, token, buffer, size, 0, special)
        if count < 0:
            buffer, size = ctypes.create_string_buffer(-count), -count
            count = write(vocabulary, token, buffer, size, 0, special)
        return buffer.raw[:count]

    return piece
