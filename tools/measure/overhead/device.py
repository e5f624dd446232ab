"""A simulated device: a target's evaluation that takes as long as a GPU's, waiting, not computing.

The evaluation itself is done first, in time that counts for nothing; then the device is busy for
so many milliseconds from the moment that it was given its work, and whoever synchronizes waits
until it is done, with the interpreter lock free. What Python does between the two calls is hidden
behind the device, as it is on CUDA. The wait is CUDA's, too, whose host threads spin where there
are processors enough: what runs after a sleep takes several times as long. The product's code does
not know of it: only the two functions of llama.cpp that it calls are others meanwhile. What a
device's evaluations send to the host is counted beside.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.ggml.graph import Graph
from specrun.bindings.library import llama

_Read = TypeVar("_Read")
_Step = Callable[[int, int], npt.NDArray[np.float32]]
_Stepper = Callable[[Context, Batch], _Step | None]

_FLOAT = 4  # bytes of a logit, a state's number, a token id
_LAST_S = 20e-6  # of a wait, which are spent without another look at the clock


@dataclass(slots=True)
class DeviceCounts:
    """What the device did so far: seconds, evaluations, and the bytes that they gave the host.

    `hidden_s` went into the true evaluations, and into waiting too long; `busy_s` is what they
    would have taken. `n_reused` evaluations found their graph ready. `drafter_bytes` are the logits
    of other contexts and the outputs that were read of heads' graphs.
    """

    hidden_s: float = 0.0
    busy_s: float = 0.0
    n_evaluations: int = 0
    n_reused: int = 0
    target_bytes: int = 0
    drafter_bytes: int = 0

    def since(self, before: DeviceCounts) -> DeviceCounts:
        """Return what was added since."""
        names = [field.name for field in fields(self)]
        return DeviceCounts(*(getattr(self, name) - getattr(before, name) for name in names))

    def copy(self) -> DeviceCounts:
        """Return the counts as they are now."""
        return self.since(DeviceCounts())


class SimulatedDevice:
    """Evaluates one context's batches in `wait_s` seconds; None: as fast as they are.

    Counts nothing while it is off.
    """

    def __init__(self, native: Any) -> None:  # noqa: ANN401 - the ctypes module
        self.wait_s: float | None = None
        self.counts = DeviceCounts()
        self.n_unwaited = 0  # evaluations after which nobody synchronized
        self._native = native
        self._decode, self._synchronize = native.llama_decode, native.llama_synchronize
        self._context: Context | None = None
        self._began: float | None = None

    def watch(self, context: Context) -> None:
        """Be the device of this context: its evaluations are only enqueued by the call."""
        self._context = context
        context.waits_for_device = True

    def decode(self, handle: int, batch: Any) -> int:  # noqa: ANN401 - a ctypes structure
        """Take the place of `llama_decode`."""
        if self.wait_s is None or self._context is None:
            return int(self._decode(handle, batch))
        if handle != self._context.handle:
            code = int(self._decode(handle, batch))
            self.counts.drafter_bytes += self._logits_bytes(handle, batch, every_token=False)
            return code
        self.n_unwaited += self._began is not None
        started, reused = time.perf_counter(), self._reused(handle)
        code = int(self._decode(handle, batch))
        self._synchronize(handle)
        self.counts.n_evaluations += 1
        self.counts.n_reused += self._reused(handle) - reused
        self.counts.target_bytes += self._target_bytes(self._context, batch)
        self._began = time.perf_counter()
        self.counts.hidden_s += self._began - started
        return code

    def synchronize(self, handle: int) -> None:
        """Take the place of `llama_synchronize`."""
        began, wait = self._began, self.wait_s
        if began is not None and wait is not None and handle == self._target_handle:
            self._began = None
            due = began + wait
            if time.perf_counter() < due:
                spin_until(due)
                # Longer than it was to be, on a busy machine much longer.
                self.counts.hidden_s += time.perf_counter() - due
            self.counts.busy_s += wait
        self._synchronize(handle)

    @property
    def _target_handle(self) -> int | None:
        return None if self._context is None else int(self._context.handle)

    def _reused(self, handle: int) -> int:
        return int(self._native.llama_perf_context(handle).n_reused)

    def _target_bytes(self, context: Context, batch: Any) -> int:  # noqa: ANN401
        """Return the bytes of logits, candidates and states that an evaluation gave the host."""
        options, model, n = context.options, context.model, int(batch.n_tokens)
        states = n * model.n_embd * (options.hidden_states + len(options.layer_inputs))
        states += n * model.n_embd_out * options.nextn_states
        logits = self._logits_bytes(context.handle, batch, every_token=options.hidden_states)
        return logits + _FLOAT * states

    def _logits_bytes(self, handle: int, batch: Any, *, every_token: bool) -> int:  # noqa: ANN401
        """Return the bytes of the logits' rows, or of what samplers left of them, and their ids."""
        native, n = self._native, int(batch.n_tokens)
        rows = [i for i in range(n) if every_token or batch.logits[i]]
        # Where no sampler cut a row, its count is the whole vocabulary, and it has no candidates.
        logits = sum(native.llama_get_sampled_logits_count_ith(handle, row) for row in rows)
        ids = sum(native.llama_get_sampled_candidates_count_ith(handle, row) for row in rows)
        return _FLOAT * int(logits + ids)


def spin_until(due: float) -> None:
    """Compute what nobody needs until `time.perf_counter()` is `due`, with the lock free.

    Hashing by iterations needs hardly any memory, and so leaves the caches nearly as they are.
    """
    while (left := due - time.perf_counter()) > 0.0:
        _hash(max(1, int(_hashes_per_second() * max(0.9 * left, min(left, _LAST_S)))))


def _hash(iterations: int) -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", iterations)


@functools.cache
def _hashes_per_second() -> float:
    """Return how many iterations take a second, by the quickest of some."""
    n, seconds = 1000, []
    for _ in range(5):
        began = time.perf_counter()
        _hash(n)
        seconds.append(time.perf_counter() - began)
    return n / min(seconds)


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """Yield a device that takes the place of llama.cpp's evaluation and reads until the end."""
    native = llama()
    device = SimulatedDevice(native)
    places = [
        (native, "llama_decode", device.decode),
        (native, "llama_synchronize", device.synchronize),
        (Graph, "peek", _noted(Graph.peek, device, lambda array: array.nbytes)),
        (Graph, "floats", _noted(Graph.floats, device, lambda array: array.nbytes)),
        (
            Graph,
            "numbers",
            _noted(Graph.numbers, device, lambda rows: _FLOAT * sum(map(len, rows))),
        ),
        (Context, "stepper", _counted(Context.stepper, device)),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for place in places:
            setattr(*place)
        yield device
    finally:
        for original in originals:
            setattr(*original)


def _counted(stepper: _Stepper, device: SimulatedDevice) -> _Stepper:
    """Return what makes the evaluations of a drafter's tokens, and counts the bytes of its rows."""

    def counting(context: Context, batch: Batch) -> _Step | None:
        step = stepper(context, batch)
        if step is None or device.wait_s is None:
            return step

        def counted(token: int, position: int) -> npt.NDArray[np.float32]:
            device.counts.drafter_bytes += _FLOAT * context.model.vocabulary.size
            return step(token, position)

        return counted

    return counting


def _noted(
    read: Callable[..., _Read], device: SimulatedDevice, bytes_of: Callable[[_Read], int]
) -> Callable[..., _Read]:
    """Return the reader of a graph's outputs, which counts their bytes."""

    def reading(graph: Graph, *names: str) -> _Read:
        found = read(graph, *names)
        if device.wait_s is not None:
            device.counts.drafter_bytes += bytes_of(found)
        return found

    return reading
