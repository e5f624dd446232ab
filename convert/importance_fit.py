"""Whether an importance matrix fits the model that is quantized with it, and is there where it must be."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

from specrun.bindings.errors import OptionError, PairError
from specrun.bindings.gguf_header import TensorInfo
from specrun.bindings.quantize_types import OF_WORDS, needs_importance
from specrun.bindings.quantizer import QuantizeOptions
from specrun.convert.quantization_plan import PlannedType

__all__ = ["check_importance"]

_PLAIN = {"F32", "F16", "BF16"}


def check_importance(model: Path, plan: Sequence[PlannedType], options: QuantizeOptions) -> int:
    """Return how many matrices will be quantized without an entry in the importance matrix that was given.

    The matrices of words, which have none by default, do not count. Raises OptionError if a type needs a
    matrix and there is none, PairError if it has entries of another model or lacks one that is needed.
    """
    tensors = {one.tensor.name: one.tensor for one in plan}
    for name, means in options.importance.items():
        _check_entry(model, name, tensors.get(name), means.size)
    changed = [one for one in plan if one.changes and one.type_name not in _PLAIN]
    missing = [one for one in changed if one.tensor.name not in options.importance]
    for one in missing:
        if not needs_importance(one.tensor.name, one.type_name, options.file_type):
            continue
        if not options.importance:
            raise OptionError(
                f"{options.file_type} stores {one.tensor.name} as {one.type_name}, which needs an importance "
                "matrix: make one with specrun imatrix, and pass it with --imatrix"
            )
        if one.tensor.name in OF_WORDS:
            raise OptionError(
                f"the importance matrix has no entry for {one.tensor.name}, as usual, and {one.type_name} needs one: "
                "name a larger type with --token-embedding-type or --output-tensor-type"
            )
        raise PairError(
            f"the importance matrix has no entry for {one.tensor.name}, which {model} needs to become "
            f"{one.type_name}: was it made for another model, or from too short a text?"
        )
    return sum(one.tensor.name not in OF_WORDS for one in missing) if options.importance else 0


def _check_entry(model: Path, name: str, tensor: TensorInfo | None, size: int) -> None:
    if tensor is None:
        raise PairError(f"the importance matrix is of another model: it has {name}, which {model} lacks")
    wanted = prod(tensor.shape) // tensor.shape[1] if len(tensor.shape) > 1 else tensor.shape[0]
    if size != wanted:
        raise PairError(
            f"the importance matrix is of another model: it has {size:,} inputs for {name}, "
            f"where {model} has {wanted:,}"
        )
