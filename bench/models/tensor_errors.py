"""Relative root-mean-square errors of the tensors of one GGUF file against those of another.

They are read and dequantized a piece at a time, so that memory does not grow with the tensors.
"""

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
    """A tensor's error: the rms of its differences from the original, over the original's rms.

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
    """Yield each tensor's error in the original's order, then the tensors of the other file alone.

    `progress` gets the numbers compared so far and in all. Raises as `read_header` and `read_array`
    do.
    """
    ours = {tensor.name: tensor for tensor in read_header(original).tensors}
    theirs = {tensor.name: tensor for tensor in read_header(other).tensors}
    total = sum(tensor.n_elements for tensor in ours.values())
    done = 0
    for name, tensor in ours.items():
        yield _compare(original, tensor, other, theirs.get(name))
        done += tensor.n_elements
        if progress is not None:
            progress(done, total)
    for name, tensor in theirs.items():
        if name not in ours:
            note = "only in the second file"
            yield TensorError(name, None, tensor.type_name, tensor.n_elements, None, note)


def _compare(
    original: Path, tensor: TensorInfo, other: Path, two: TensorInfo | None
) -> TensorError:
    ours = tensor.name, tensor.type_name
    if two is None:
        return TensorError(*ours, None, tensor.n_elements, None, "only in the first file")

    def result(relative_rms: float | None, note: str = "") -> TensorError:
        return TensorError(*ours, two.type_name, tensor.n_elements, relative_rms, note)

    if tensor.shape != two.shape:
        shapes = (" x ".join(map(str, tensor.shape[::-1])) for tensor in (tensor, two))
        return result(None, "other shape: {} and {}".format(*shapes))
    if not (_is_known(tensor) and _is_known(two)):
        return result(None, "a type that cannot be read here")
    squares = errors = 0.0
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
    block, n_bytes = GGML_QUANT_SIZES[kind]
    try:  # gguf knows more types than it can dequantize
        dequantize(np.zeros((1, n_bytes), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return tensor.shape[0] % block == 0


def _pieces(path: Path, tensor: TensorInfo) -> Iterator[npt.NDArray[Any]]:
    """Yield the tensor's numbers, flat, in pieces that begin at the same rows for every type."""
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
