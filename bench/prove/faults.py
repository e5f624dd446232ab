"""Faults that may meet an answer while it is made, and how the answer ends then.

The place of a fault is drawn from a generator, so that a failure can be repeated: an interrupt
comes at a counted line of Python, a failed evaluation at a counted call.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal
from unittest import mock

from specrun.bindings.errors import BusyError, ClosedError, DecodeError
from specrun.bindings.library import llama
from specrun.runtime.engine import GenerationStream, Runtime

Fault = Literal["none", "cancelled", "dropped", "interrupted", "decode failed", "asked", "closed"]
"""none; the stream is closed or dropped; Ctrl-C; llama.cpp reports a failure; a second answer is
requested meanwhile; the runtime is closed."""

_CODES = (1, 2, -1, -2, -3)  # no slot, aborted, an invalid batch, no memory, a failed computation
_LINES = 6000  # about as many are executed for an answer
_PACKAGE = __name__.partition(".")[0]


class InjectedInterrupt(KeyboardInterrupt):
    """An interrupt that was raised on purpose, as Ctrl-C would be."""


def take_answer(
    runtime: Runtime, stream: GenerationStream, fault: Fault, source: random.Random
) -> bool:
    """Iterate over an answer that meets a fault; return whether it came to its own end.

    Raises errors that no fault explains.
    """
    if fault == "interrupted":
        try:
            with _interrupt_at(int(_LINES ** source.random())):
                stream.drain()
        except InjectedInterrupt:
            return False
        return True
    if fault == "decode failed":
        try:
            with _failing_evaluation(source.randrange(30), source):
                stream.drain()
        except DecodeError:
            return False
        return True
    return _take_until(runtime, stream, fault, source.randrange(40))


def _take_until(runtime: Runtime, stream: GenerationStream, fault: Fault, n_tokens: int) -> bool:
    """Iterate, and cause the fault at its token, if the answer gets there."""
    for index, _ in enumerate(stream):
        if index != n_tokens or fault == "none":
            continue
        if fault == "asked":
            try:
                runtime.generate((3, 1, 4), max_tokens=2)
            except BusyError:
                continue
            raise AssertionError("a second answer was given while the first was being made")
        if fault == "closed":
            runtime.close()
            try:
                next(stream)
            except ClosedError:
                return False
            raise AssertionError("a closed runtime went on answering")
        if fault == "cancelled":
            stream.close()
        return False
    return True


@contextmanager
def _interrupt_at(line: int) -> Iterator[None]:
    """Raise an interrupt at the line-th line of specrun that is executed inside the block."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 - sys.settrace's
        nonlocal left
        if not frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}.") or left < 0:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise InjectedInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _failing_evaluation(number: int, source: random.Random) -> Iterator[None]:
    """Let one of llama.cpp's evaluations report a failure, done or not: target's or drafter's."""
    native, code = llama().llama_decode, source.choice(_CODES)
    computes, calls = source.random() < 0.5, 0

    def llama_decode(context: object, batch: object) -> int:
        nonlocal calls
        calls += 1
        if calls - 1 != number:
            return int(native(context, batch))
        if computes:
            native(context, batch)
        return code

    with mock.patch.object(llama(), "llama_decode", llama_decode):
        yield
