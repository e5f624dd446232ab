"""ggml graphs: built with shapes checked, then run on arrays."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import (
    ClosedError,
    DecodeFailedError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from specrun.bindings.functions import call
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.tensor import (
    DTYPES,
    F16,
    F32,
    I32,
    I64,
    Tensor,
    fields,
    new_context,
    new_tensor,
)
from specrun.bindings.library import NativeHandle
from specrun.bindings.threads import FORK

# == A graph with its memory: arrays go in, ggml computes, arrays come out =========================


Array = npt.NDArray[np.generic]


class Graph:
    """A graph with its memory, to `run` again and again. Close it before its weights.

    A caller often fills the arrays of `inputs` in place instead, then calls `compute` and
    `read`: if a tensor lies in the CPU's memory, its array is that memory, and nothing is
    copied. All inputs but kept ones have to be filled before each `compute`, which may overwrite
    them. `filled` names the contents of the kept ones; callers set it, None is unset. The
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
        # Only tensors in a GPU's memory are copied: the other arrays are ggml's memory.
        self._copied_in = [end for end in ends.values() if not end.is_mapped]
        self._outputs = {name: _End(output, scheduler) for name, output in outputs.items()}
        self._scheduler: NativeHandle | None = scheduler

    def compute(self) -> None:
        """Compute with the contents of `inputs`; the device counts the time."""
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
    """An input or output of a graph that has its memory, and its array."""

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


# == Building: ggml's own checks would end the process =============================================
#
# Shapes are in ggml's order, fastest dimension first: n rows of h numbers are (h, n). numpy sees
# the same memory with the dimensions reversed, [n, h].


# GGML_ROPE_TYPE_NEOX, and enum ggml_sort_order.
_NEOX = 2
_ASCENDING, _DESCENDING = 0, 1
_PARTS = 4  # tensors that one operation of the builder may need


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings as a model's metadata gives them.

    `neox` pairs the halves of a head (Qwen, Gemma), otherwise neighbours (GGUF's Llama layout).
    With YaRN, `trained` is the context that it stretches by 1 / `freq_scale`; 0: there is none.
    Rotated heads are then multiplied by `magnitude` and YaRN's own 0.1 ln(1 / freq_scale) + 1.
    """

    n_dims: int
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    neox: bool = False
    trained: int = 0
    magnitude: float = 1.0


class GraphBuilder:
    """Collects operations on a device; `build` makes them a graph that runs as often as wanted.

    Sizes that do not fit raise ValueError here: in ggml they would abort the process.
    """

    def __init__(self, device: ComputeDevice, max_operations: int = 256) -> None:
        self._device = device
        self._size = max_operations * _PARTS
        memory = self._size * call("ggml_tensor_overhead")()
        memory += call("ggml_graph_overhead_custom")(self._size, False)
        self._context: NativeHandle | None = new_context(memory)
        self._graph: int = call("ggml_new_graph_custom")(self._context, self._size, False)
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._left = max_operations

    # -- inputs and outputs ------------------------------------------------------------------------

    def input(self, name: str, type_number: int, *shape: int, kept: bool = False) -> Tensor:
        """Return an input that `Graph.run` is given by this name.

        A `kept` one keeps its contents from one `compute` to the next.
        """
        tensor = Tensor(new_tensor(self._context, type_number, shape))
        call("ggml_set_input")(tensor.handle)
        if kept:  # the allocator gives no memory of outputs to other nodes
            call("ggml_set_output")(tensor.handle)
        call("ggml_set_name")(tensor.handle, name.encode())
        self._inputs[name] = tensor
        return tensor

    def output(self, name: str, tensor: Tensor) -> None:
        """Let `Graph.run` return a tensor by this name."""
        tensor = tensor if tensor.is_contiguous else self.contiguous(tensor)
        # Without the mark the allocator would give an output's memory to later nodes.
        call("ggml_set_output")(tensor.handle)
        self._outputs[name] = tensor
        self.keep(tensor)

    def keep(self, tensor: Tensor) -> None:
        """Have a node computed for its effect (`set_rows` into a cache) before later ones."""
        call("ggml_build_forward_expand")(self._graph, tensor.handle)

    def build(self) -> Graph:
        """Return the graph; the builder cannot be used any more."""
        context, self._context = self._context, None
        if context is None:
            raise ClosedError("the graph was built already")
        return Graph(self._device, context, self._graph, self._size, self._inputs, self._outputs)

    def close(self) -> None:
        """Free the collected nodes, if they were not built."""
        self._context = None

    # -- operations --------------------------------------------------------------------------------

    def mul_mat(self, weight: Tensor, x: Tensor) -> Tensor:
        """Return rows times a matrix: weight (k, m), x (k, n) -> (m, n); batches of x broadcast."""
        w, s = weight.shape, x.shape
        fits = w[0] == s[0] and s[2] % w[2] == 0 and s[3] % w[3] == 0
        _require(fits, "mul_mat", weight, x)
        return self._add("ggml_mul_mat", weight, x)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a + b, b repeated if it is smaller."""
        _require(_repeats(b, a), "add", a, b)
        return self._add("ggml_add", a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a - b, b repeated if it is smaller."""
        _require(_repeats(b, a), "sub", a, b)
        return self._add("ggml_sub", a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a * b by element, b repeated if it is smaller."""
        _require(_repeats(b, a), "mul", a, b)
        return self._add("ggml_mul", a, b)

    def scale(self, a: Tensor, factor: float) -> Tensor:
        """Return a * factor."""
        return self._add("ggml_scale", a, factor)

    def silu(self, a: Tensor) -> Tensor:
        """Return a * sigmoid(a)."""
        return self._add("ggml_silu", a)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        _require(gate.shape == up.shape, "swiglu", gate, up)
        return self._add("ggml_swiglu_split", gate, up)

    def rms_norm(self, a: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        """Return each row over its root mean square, times `weight` if it is given."""
        normed = self._add("ggml_rms_norm", a, eps)
        return normed if weight is None else self.mul(normed, weight)

    def get_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """Return rows of a table as F32: table (h, v, b), rows I32 (n, b) -> (h, n, b)."""
        fits = rows.type == I32 and table.shape[2] == rows.shape[1] and rows.shape[3] == 1
        _require(fits, "get_rows", table, rows)
        return self._add("ggml_get_rows", table, rows)

    def set_rows(self, table: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        """Write F32 values (h, n) to rows I64 (n) of a table that outlives the graph. `keep` it.

        Returns the table for nodes that read it after the writing.
        """
        t, v = table.shape, values.shape
        fits = t[0] == v[0] and v[1] == rows.shape[0] and t[2:] == v[2:]
        fits = fits and rows.type == I64 and values.type == F32
        _require(fits, "set_rows", table, values)
        return self._add("ggml_set_rows", table, values, rows, writes_weights=True)

    def copy(self, a: Tensor, place: Tensor) -> Tensor:
        """Write all of `a` into a tensor, or a view of one, that outlives the graph. `keep` it."""
        fits = a.type == place.type and a.shape == place.shape
        fits = fits and a.is_contiguous and place.is_contiguous
        _require(fits, "copy", a, place)
        return self._add("ggml_cpy", a, place, writes_weights=True)

    def concat(self, a: Tensor, b: Tensor, dimension: int = 0) -> Tensor:
        """Return a followed by b along a dimension."""
        same = all(a.shape[i] == b.shape[i] for i in range(4) if i != dimension)
        fits = 0 <= dimension < 4 and same and a.type == b.type
        _require(fits, "concat", a, b)
        return self._add("ggml_concat", a, b, dimension)

    def contiguous(self, a: Tensor) -> Tensor:
        """Return a copy whose elements lie in order."""
        return self._add("ggml_cont", a)

    def cast(self, a: Tensor, type_number: int) -> Tensor:
        """Return the same numbers in another type."""
        return self._add("ggml_cast", a, type_number)

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Return a view with dimension i of `a` as dimension axes[i]."""
        _require(sorted(axes) == [0, 1, 2, 3], "permute", a)
        return self._add("ggml_permute", a, *axes)

    def reshape(self, a: Tensor, *shape: int) -> Tensor:
        """Return the same elements in two or three other dimensions."""
        fits = len(shape) in (2, 3) and math.prod(shape) == a.n_elements and a.is_contiguous
        _require(fits, "reshape", a)
        return self._add(f"ggml_reshape_{len(shape)}d", a, *shape)

    def columns(self, a: Tensor, first: int, count: int) -> Tensor:
        """Return a view of `count` numbers of each row from `first` on: (h, n) -> (count, n)."""
        fits = first >= 0 and 0 < count <= a.shape[0] - first and a.shape[2:] == (1, 1)
        _require(fits, "columns", a)
        return self._add("ggml_view_2d", a, count, a.shape[1], a.strides[1], first * a.strides[0])

    def rows(self, a: Tensor, first: int, count: int) -> Tensor:
        """Return a view of `count` rows from row `first` on."""
        fits = first >= 0 and 0 < count <= a.shape[1] - first and a.shape[2:] == (1, 1)
        _require(fits, "rows", a)
        return self._add("ggml_view_2d", a, a.shape[0], count, a.strides[1], first * a.strides[1])

    def rope(
        self, a: Tensor, positions: Tensor, rope: Rope, factors: Tensor | None = None
    ) -> Tensor:
        """Rotate heads by position: a (d, heads, n), positions I32 (n)."""
        n_dims, mode = rope.n_dims, _NEOX if rope.neox else 0
        fits = positions.type == I32 and positions.shape[0] == a.shape[2]
        fits = fits and 0 < n_dims <= a.shape[0] and n_dims % 2 == 0
        fits = fits and (factors is None or factors.shape[0] >= n_dims // 2)
        _require(fits, "rope", a, positions)
        # YaRN's share, magnitude, and the rotations between which frequencies are interpolated.
        yarn = (1.0 if rope.trained else 0.0, rope.magnitude, 32.0, 1.0)
        given = n_dims, mode, rope.trained, rope.freq_base, rope.freq_scale, *yarn
        return self._add("ggml_rope_ext", a, positions, factors, *given)

    def soft_max(self, a: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Return softmax(scale a + mask) of each row of a (k, n, heads); mask (k, n) F32 or F16."""
        if mask is None:
            return self._add("ggml_soft_max", a if scale == 1.0 else self.scale(a, scale))
        fits = mask.shape[0] == a.shape[0] and mask.shape[1] >= a.shape[1]
        fits = fits and mask.type in (F32, F16) and mask.is_contiguous
        _require(fits, "soft_max", a, mask)
        # The last is ALiBi's bias, which is off.
        return self._add("ggml_soft_max_ext", a, mask, scale, 0.0)

    def log_sum_exp(self, a: Tensor, best: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return log sum exp of each row, (v, n) -> (1, n).

        `best` are indices and elements as `best` returns them, if they are known.
        """
        indices, values = best or self.best(a, 1)
        k = indices.shape[0]
        # From the largest element and its share: softmax is one pass of vector instructions, while
        # an exponential, a sum and their stores take eight times as long.
        shares = self._add("ggml_log", self.pick(self.soft_max(a), indices, k))
        if k > 1:
            values, shares = self.columns(values, 0, 1), self.columns(shares, 0, 1)
        return self.sub(values, shares)

    def argmax(self, a: Tensor) -> Tensor:
        """Return the index of the largest of each row: (v, n) -> I32 (n)."""
        _require(a.type == F32 and a.shape[2:] == (1, 1), "argmax", a)
        return self._add("ggml_argmax", a)

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """Return the indices of the k largest of each row, unordered: (v, n) -> I32 (k, n)."""
        _require(0 < k <= a.shape[0] and a.type == F32, "top_k", a)
        return self._add("ggml_top_k", a, k)

    def ascending(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row of indices I32 (k, n) in ascending order, and their places before."""
        # As floats, which are exact up to 2 ** 24: ggml sorts no integers.
        order = self._add("ggml_argsort", self.cast(indices, F32), _ASCENDING)
        return self.pick(indices, order, indices.shape[0]), order

    def best(self, a: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of each row, largest first: indices I32 (k, n), elements (k, n)."""
        n = a.shape[1]
        if k == 1:
            indices = self.reshape(self.argmax(a), 1, n)
            return indices, self.pick(a, indices, 1)
        # Only the k values are sorted, not whole rows of a vocabulary.
        indices = self.top_k(a, k)
        values = self.pick(a, indices, k)
        order = self._add("ggml_argsort", values, _DESCENDING)
        return self.pick(indices, order, k), self.pick(values, order, k)

    def pick(self, a: Tensor, indices: Tensor, k: int) -> Tensor:
        """Return the elements of each row at k indices of its own: (v, n), I32 (k, n) -> (k, n)."""
        v, n = a.shape[:2]
        _require(indices.n_elements == k * n and a.shape[2:] == (1, 1), "pick", a, indices)
        # ggml gathers rows only: seen as n tables of v rows of one number, rows are elements.
        rows = self.get_rows(self.reshape(a, 1, v, n), self.reshape(indices, k, n))
        return self.reshape(rows, k, n)

    def _add(
        self, name: str, *arguments: Tensor | float | None, writes_weights: bool = False
    ) -> Tensor:
        if self._context is None:
            raise ClosedError("the graph was built already")
        if self._left == 0:
            raise ValueError("the graph has more operations than it was made for")
        self._left -= 1
        natives = (given.handle if isinstance(given, Tensor) else given for given in arguments)
        result = Tensor(call(name)(self._context, *natives))
        # Checked here: a node that no backend computes would end the process when the graph runs.
        if not self._device.supports(result.handle, writes_weights=writes_weights):
            problem = f"no backend of ggml here computes {name} for these tensor types"
            raise UnsupportedModelError(problem)
        return result


def _repeats(small: Tensor, large: Tensor) -> bool:
    return all(b % a == 0 for a, b in zip(small.shape, large.shape, strict=True))


def _require(fits: bool, operation: str, *tensors: Tensor) -> None:
    if not fits:
        shapes = " and ".join(str(tensor.shape) for tensor in tensors)
        raise ValueError(f"{operation} of tensors of shapes {shapes}")
