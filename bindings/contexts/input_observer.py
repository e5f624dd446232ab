"""Importance matrices: sums of squares of all that a model's matrices are multiplied with.

llama.cpp calls back twice for every node of the graph, before and after it is computed
(`cb_eval`); a callback is fixed when a context is made, and splits the graph.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import SpecrunError
from specrun.bindings.functions import call
from specrun.bindings.ggml.tensor import DTYPES, F32, TensorFields, fields
from specrun.bindings.library import llama

_FEWEST_ROWS = 16  # as llama.cpp's own tool: fewer are no part of a text that is read in batches
_OBJECT_BYTES = 32  # GGML_OBJECT_SIZE, which ggml_tensor_overhead counts, too


@functools.cache
def _operation_number(name: str) -> int:
    """Return ggml's number of an operation such as "MUL_MAT"; raises SpecrunError if there is none.

    The first call also checks that tensors look as `TensorFields` has them.
    """
    if call("ggml_tensor_overhead")() != ctypes.sizeof(TensorFields) + _OBJECT_BYTES:
        problem = "this llama.cpp has another ggml_tensor than specrun reads"
        raise SpecrunError(f"{problem}: install the pinned version")
    for number in range(256):
        if call("ggml_op_name")(number) == name.encode():
            return number
    raise SpecrunError(f"this llama.cpp has no operation {name}: install the pinned version")


def _tensor_array(tensor: TensorFields) -> npt.NDArray[Any]:
    """Return a computed F32 or I32 tensor as an array of numpy's shape [ne3, ne2, ne1, ne0].

    A view if the numbers lie in the machine's memory, valid until ggml reuses that memory; a
    copy from any other device.
    """
    kind = np.dtype(DTYPES[tensor.type])
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    n_bytes = kind.itemsize + sum(
        (length - 1) * stride for length, stride in zip(shape, strides, strict=True)
    )
    if call("ggml_backend_buffer_is_host")(tensor.buffer):
        memory = (ctypes.c_uint8 * n_bytes).from_address(tensor.data)
    else:
        memory = (ctypes.c_uint8 * n_bytes)()
        get = call("ggml_backend_tensor_get")
        get(ctypes.addressof(tensor), ctypes.addressof(memory), 0, n_bytes)
    return np.ndarray(shape, kind, memory, strides=strides)


InputSums = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
"""Sums of squares float32 [n, width], of int64 [n] rows each; n as in `ImportanceEntry`."""


class InputObserver:
    """Pass it to a `Context`: it sums over every evaluation, and `take` hands out the sums.

    `wants` decides by a matrix's name, such as "blk.0.attn_q.weight". Matrices of experts have a
    row for each expert, summed over the tokens that were sent to it.
    """

    def __init__(self, wants: Callable[[str], bool]) -> None:
        self._wants = wants
        self._multiply = _operation_number("MUL_MAT")
        self._multiply_experts = _operation_number("MUL_MAT_ID")
        self._sums: dict[str, InputSums] = {}
        self._error: BaseException | None = None
        # q, k and v, and gate and up, read one input: its sums are taken once.
        self._last: tuple[int, npt.NDArray[np.float32]] | None = None
        self.callback = llama().ggml_backend_sched_eval_callback(self._called)
        """The value of `llama_context_params.cb_eval`; lives as long as this object."""

    def take(self) -> dict[str, InputSums]:
        """Return the sums since the last call, by the names of matrices.

        Raises the errors of the summing: a KeyboardInterrupt, or SpecrunError for sums that are
        not finite.
        """
        sums, self._sums, self._last = self._sums, {}, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        for name, (squares, _) in sums.items():
            if not np.isfinite(squares).all():
                problem = f"the inputs of {name} are not finite"
                raise SpecrunError(f"{problem}: the model or its weights are damaged")
        return sums

    def _called(self, address: Any, ask: bool, _data: object) -> bool:  # noqa: ANN401 - a pointer
        # Nothing can be raised through native code: it is kept, and the evaluation goes on.
        if self._error is not None:
            return not ask
        try:
            node = fields(address)
            if ask:
                if self._last is not None and self._last[0] == address:
                    self._last = None  # it is about to be computed anew
                return self._is_wanted(node)
            self._add(node)
        except BaseException as error:
            self._error = error
        return True

    def _is_wanted(self, node: TensorFields) -> bool:
        if node.op not in (self._multiply, self._multiply_experts):
            return False
        inputs = fields(node.src[1])
        if inputs.type != F32 or (node.op == self._multiply and inputs.ne[1] < _FEWEST_ROWS):
            return False
        return self._wants(_plain_name(fields(node.src[0]).name))

    def _add(self, node: TensorFields) -> None:
        matrix, inputs = fields(node.src[0]), fields(node.src[1])
        name = _plain_name(matrix.name)
        if node.op == self._multiply_experts:
            chosen = _tensor_array(fields(node.src[2]))[0, 0]
            squares, counts = expert_sums(_tensor_array(inputs)[0], chosen, int(matrix.ne[2]))
        else:
            n2, n3 = int(matrix.ne[2]), int(matrix.ne[3])
            squares = self._dense_sums(int(node.src[1]), inputs, n2, n3)
            rows = int(inputs.ne[1] * inputs.ne[2] * inputs.ne[3])
            counts = np.array([rows // (n2 * n3)], np.int64)
        if name in self._sums:
            before = self._sums[name]
            squares, counts = before[0] + squares, before[1] + counts
        self._sums[name] = squares, counts

    def _dense_sums(
        self, address: int, inputs: TensorFields, n2: int, n3: int
    ) -> npt.NDArray[np.float32]:
        if n2 * n3 == 1:
            if self._last is None or self._last[0] != address:
                rows = _tensor_array(inputs).reshape(-1, int(inputs.ne[0]))
                self._last = address, np.einsum("ij,ij->j", rows, rows)[None, :]
            return self._last[1]
        # One matrix serves several of the inputs' if they are more (broadcasting, ggml_mul_mat).
        array = _tensor_array(inputs)
        sums = np.zeros((n3, n2, array.shape[-1]), np.float32)
        for third in range(array.shape[0]):
            for second in range(array.shape[1]):
                rows = array[third, second]
                sums[third % n3, second % n2] += np.einsum("ij,ij->j", rows, rows)
        return sums.reshape(1, -1)


def expert_sums(
    inputs: npt.NDArray[np.float32], chosen: npt.NDArray[np.int32], n_experts: int
) -> InputSums:
    """Return sums and counts [n_experts, ...] of inputs [tokens, 1 or used, width] by expert."""
    n_tokens, used = chosen.shape
    experts = chosen.reshape(-1)
    if experts.size and not 0 <= experts.min() <= experts.max() < n_experts:
        problem = f"a token was sent to an expert outside 0 to {n_experts - 1}"
        raise SpecrunError(f"{problem}: the model is damaged")
    spread = np.broadcast_to(np.square(inputs), (n_tokens, used, inputs.shape[-1]))
    squares = spread.reshape(n_tokens * used, -1)
    counts = np.bincount(experts, minlength=n_experts).astype(np.int64)
    sums = np.zeros((n_experts, inputs.shape[-1]), np.float32)
    present = np.flatnonzero(counts)
    if len(present):
        # Sorted by expert, so that one sum over each stretch of rows is an expert's.
        order = np.argsort(experts, kind="stable")
        starts = np.cumsum(counts)[present] - counts[present]
        sums[present] = np.add.reduceat(squares[order], starts, axis=0)
    return sums, counts


def _plain_name(name: bytes) -> str:
    """Return a matrix's own name: if the scheduler copied it to a device, the part after a #."""
    parts = name.split(b"#")
    return (parts[1] if len(parts) > 1 else parts[0]).decode("utf-8", "replace")
