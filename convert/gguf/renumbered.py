"""A GGUF file with other numbers in its tensors: metadata, names, shapes and types stay."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.gguf import TensorInfo
from specrun.bindings.quantizer import quantize_rows
from specrun.convert.checkpoint import stored_as
from specrun.convert.gguf.gguf_source import GGUFSource
from specrun.convert.gguf.writer import PlannedTensor, write_gguf

_PLAIN = ("F32", "F16", "BF16")
# Types that only an importance matrix makes; without one their weights are kept in more bits.
_WITH_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")


def write_renumbered(
    source: GGUFSource,
    output: str | os.PathLike[str],
    numbers: Mapping[str, npt.NDArray[np.float32]],
    *,
    force: bool = False,
) -> int:
    """Write `source` to `output` with `numbers` (float32, rows first) in its tensors; return bytes.

    Each tensor keeps its type, quantized anew; those that cannot be quantized without an importance
    matrix become Q8_0. Tensors that are not named stay as they are, bit by bit. Raises OptionError
    if `output` exists without `force`, MalformedFileError for numbers that cannot be stored.
    Nothing is left behind on failure.
    """
    planned = [
        _planned(source, tensor, numbers.get(tensor.name)) for tensor in source.header.tensors
    ]
    return write_gguf(
        output,
        source.header.architecture,
        source.metadata(),
        planned,
        force=force,
        source=source.path,
    )


def _planned(
    source: GGUFSource, tensor: TensorInfo, numbers: npt.NDArray[np.float32] | None
) -> PlannedTensor:
    if numbers is None:
        return source.unchanged(tensor, tensor.name)
    shape = tensor.shape[::-1]
    if numbers.shape != shape:
        raise MalformedFileError(f"{tensor.name} has the shape {shape}, not {numbers.shape}")
    kind = "Q8_0" if tensor.type_name in _WITH_IMPORTANCE else tensor.type_name
    load = functools.partial(_stored, numbers, kind, tensor.name)
    return PlannedTensor(tensor.name, shape, kind, load)


def _stored(numbers: npt.NDArray[np.float32], kind: str, name: str) -> npt.NDArray[Any]:
    if kind in _PLAIN:
        return stored_as(numbers, kind, name)
    blocks = quantize_rows(np.ascontiguousarray(numbers.reshape(-1, numbers.shape[-1])), kind)
    return blocks.reshape(*numbers.shape[:-1], -1)
