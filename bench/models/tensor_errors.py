"""How far the tensors of one GGUF file are from those of another, one tensor at a time, one piece
at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from specrun.bindings.gguf import TensorInfo, read_header
from specrun.convert.checkpoint import read_array

_PIECE = 1 << 20  # numbers at a time
_WHOLE = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}


@dataclass(frozen=True, slots=True)
class TensorError:
    """How far one tensor is off: root mean square of the differences over that of the original's
    numbers.

    `relative_rms` is None where the two cannot be compared; `note` then says why.
    """

    name: str
    original_type: str | None
    other_type: str | None
    n_elements: int
    relative_rms: float | None
    note: str = ""


def tensor_errors(
    original: Path, other: Path, progress: Callable[[int, int], None] | None = None
) -> Iterator[TensorError]:
    """Yield the error of each tensor, in the original's order, then the tensors that only the other
    has.

    `progress` gets the numbers compared so far and in all. Raises as `read_header` and `read_array`
    do.
    """
    ours = {tensor.name: tensor for tensor in read_header(original).tensors}
    theirs = {tensor.name: tensor for tensor in read_header(other).tensors}
    total = sum(tensor.n_elements for tensor in ours.values())
    done = 0
    for name, tensor in ours.items():
        found = theirs.get(name)
        yield _compare(original, tensor, other, found)
        done += tensor.n_elements
        if progress is not None:
            progress(done, total)
    for name, tensor in theirs.items():
        if name not in ours:
            yield TensorError(
                name, None, tensor.type_name, tensor.n_elements, None, "only in the second file"
            )


def _compare(
    original: Path, tensor: TensorInfo, other: Path, two: TensorInfo | None
) -> TensorError:
    def result(relative_rms: float | None, note: str = "") -> TensorError:
        kind = two.type_name if two is not None else None
        return TensorError(
            tensor.name, tensor.type_name, kind, tensor.n_elements, relative_rms, note
        )

    if two is None:
        return result(None, "only in the first file")
    if tensor.shape != two.shape:
        shapes = (" x ".join(map(str, tensor.shape[::-1])) for tensor in (tensor, two))
        return result(None, "other shape: {} and {}".format(*shapes))
    if not (_is_known(tensor) and _is_known(two)):
        return result(None, "a type that cannot be read here")
    squares, errors = 0.0, 0.0
    for a, b in zip(_pieces(original, tensor), _pieces(other, two), strict=True):
        wide = a.astype(np.float64)
        squares += float(np.dot(wide, wide))
        wide -= b
        errors += float(np.dot(wide, wide))
    if squares == 0.0:
        return result(0.0 if errors == 0.0 else math.inf)
    return result(math.sqrt(errors / squares))


def _is_known(tensor: TensorInfo) -> bool:
    if tensor.type_name in _WHOLE:
        return True
    if tensor.type_name not in GGMLQuantizationType.__members__:
        return False
    kind = GGMLQuantizationType[tensor.type_name]
    block, _ = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return tensor.shape[0] % block == 0


def _pieces(path: Path, tensor: TensorInfo) -> Iterator[npt.NDArray[Any]]:
    """Yield the tensor's numbers, flat, in pieces of equal places whatever its type."""
    row = tensor.shape[0]
    n_rows = tensor.n_elements // row
    row_bytes = tensor.n_bytes // n_rows
    step = max(1, _PIECE // row)
    for start in range(0, n_rows, step):
        count = min(step, n_rows - start)
        raw = read_array(path, np.uint8, (count, row_bytes), tensor.offset + start * row_bytes)
        if tensor.type_name in _WHOLE:
            yield raw.reshape(-1).view(_WHOLE[tensor.type_name])
        else:
            yield dequantize(raw, GGMLQuantizationType[tensor.type_name]).reshape(-1)
