"""A graph with its memory, ready to run: arrays go in, ggml computes, arrays come out."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import ClosedError, DecodeFailedError, OutOfMemoryError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import call, fields
from specrun.bindings.ggml.tensor import DTYPES, Tensor
from specrun.bindings.library import NativeHandle
from specrun.bindings.threads import FORK

Array = npt.NDArray[np.generic]


class Graph:
    """A graph with its memory, to `run` again and again. Close it before its weights.

    Who runs one often fills the arrays of `inputs` in place instead, then calls `compute` and
    `read`: where a tensor lies in the CPU's memory, its array is that memory, and nothing is
    copied. All inputs but kept ones have to be filled before each `compute`, which may overwrite
    them. `filled` is whoever fills the kept ones to note what they hold; None says nothing yet. The
    arrays die with the graph: they are not to be kept.
    """

    def __init__(
        self,
        device: ComputeDevice,
        context: NativeHandle,
        graph: int,
        size: int,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> None:
        self.inputs: dict[str, Array] = {}
        self.cells: dict[str, memoryview] = {}  # their numbers, one after the other
        self.filled: int | None = None
        self._device = device
        self._graph = graph
        self._compute = call("ggml_backend_sched_graph_compute")
        scheduler = device.new_scheduler(size, context)
        if not call("ggml_backend_sched_alloc_graph")(scheduler, graph):
            raise OutOfMemoryError("there is no room for a head's graph on the compute device")
        ends = {name: _End(given, scheduler) for name, given in inputs.items()}
        self.inputs = {name: end.array for name, end in ends.items()}
        self.cells = {name: end.cells for name, end in ends.items()}
        # Only what lies in a GPU's memory is copied: the other arrays are ggml's memory.
        self._copied_in = [end for end in ends.values() if not end.is_mapped]
        self._outputs = {name: _End(output, scheduler) for name, output in outputs.items()}
        self._scheduler: NativeHandle | None = scheduler

    def compute(self) -> None:
        """Compute with what `inputs` hold; the device counts the time."""
        scheduler = self._scheduler or self._open()
        if FORK.lost:
            FORK.check()
        if self._device.n_threads > 1:
            FORK.note_work()
        started = time.perf_counter()
        for end in self._copied_in:
            end.write()
        status = self._compute(scheduler, self._graph)
        if status != 0:
            problem = f"ggml could not compute a head's graph (status {status})"
            raise DecodeFailedError(problem, status)
        self._device.native_seconds += time.perf_counter() - started

    def read(self, name: str) -> Array:
        """Return a copy of an output of the last `compute`."""
        return self.peek(name).copy()

    def peek(self, name: str) -> Array:
        """Return an output of the last `compute`, valid until the next or until `close`."""
        if self._scheduler is None:
            self._open()  # raises
        end = self._outputs[name]
        return end.array if end.is_mapped else end.fetch()

    floats = cast("Callable[[Graph, str], npt.NDArray[np.float32]]", peek)
    """`peek` of an output of 32-bit floats."""

    def numbers(self, *names: str) -> list[list[int]]:
        """Return the whole numbers of outputs of the last `compute`: of each all, row by row."""
        if self._scheduler is None:
            self._open()  # raises
        found: list[list[int]] = []
        for name in names:  # no comprehension: behind an evaluation a frame costs as much as a read
            end = self._outputs[name]
            if not end.is_mapped:
                end.fetch()
            found.append(end.cells.tolist())
        return found

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Compute with these inputs, return copies of the outputs; shapes are numpy's: [n, h]."""
        for name, array in self.inputs.items():
            given = inputs[name]
            if given.shape == array.shape:
                array[...] = given
            elif given.size == array.size:
                array[...] = given.reshape(array.shape)
            else:
                wanted = f"the graph takes {array.shape}"
                raise ValueError(f"input {name} has shape {given.shape}, and {wanted}")
        self.compute()
        return {name: output.fetch().copy() for name, output in self._outputs.items()}

    def close(self) -> None:
        """Free the graph and its memory, once no array is left; again does nothing."""
        self._scheduler = None
        self.inputs, self.cells, self._outputs, self._copied_in = {}, {}, {}, []

    def _open(self) -> NativeHandle:
        scheduler = self._scheduler  # read once: another thread may close it
        if scheduler is None:
            raise ClosedError("the graph is closed")
        return scheduler


class _End:
    """An input or output of a graph that has its memory, and the array that stands for it."""

    __slots__ = ("_get", "_handle", "_pointer", "_set", "array", "cells", "is_mapped")

    def __init__(self, tensor: Tensor, scheduler: NativeHandle) -> None:
        shape, dtype = tensor.array_shape, np.dtype(DTYPES[tensor.type])
        n_bytes = tensor.n_elements * dtype.itemsize
        buffer = fields(tensor.handle).buffer
        self._handle = tensor.handle
        self._get, self._set = call("ggml_backend_tensor_get"), call("ggml_backend_tensor_set")
        self.is_mapped = bool(buffer) and bool(call("ggml_backend_buffer_is_host")(buffer))
        self._pointer: int = call("ggml_get_data")(tensor.handle) if self.is_mapped else 0
        self.array: Array
        if self.is_mapped:
            memory: Any = (ctypes.c_uint8 * n_bytes).from_address(self._pointer)
            memory.keeps = scheduler  # whose memory it is
            self.array = np.frombuffer(memoryview(memory), dtype).reshape(shape)
        else:
            self.array = np.empty(shape, dtype)
            self._pointer = self.array.ctypes.data
        self.cells = self.array.reshape(-1).data

    def write(self) -> None:
        self._set(self._handle, self._pointer, 0, self.array.nbytes)

    def fetch(self) -> Array:
        if not self.is_mapped:
            self._get(self._handle, self._pointer, 0, self.array.nbytes)
        return self.array
