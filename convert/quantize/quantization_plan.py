"""Plan of a quantization: the type of every tensor, as llama.cpp's log of a dry run names it.

An importance matrix is checked against the plan: it must fit the model, and be there where a type
of less than 3 bits cannot be made without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import OptionError, PairError, SpecrunError
from specrun.bindings.gguf import GGUFHeader, TensorInfo, stored_bytes
from specrun.bindings.quantizer import TOKEN_MATRICES, QuantizeOptions, needs_importance

# Such as "[   3/  48] blk.0.attn_k.weight - [ 4096, 1024, 1, 1], type = f16, size = ... (q4_K)".
_LINE = re.compile(r"\[ *\d+/ *\d+\] (.+?) +- \[[\d, ]+\], type = +(\w+),(?:.*-> .* \((\w+)\))?")


@dataclass(frozen=True, slots=True)
class PlannedType:
    """A tensor and the type it will be stored in."""

    tensor: TensorInfo
    type_name: str

    @property
    def changes(self) -> bool:
        """Whether it is stored in another type than now."""
        return self.type_name != self.tensor.type_name

    @property
    def n_bytes(self) -> int:
        """The size it will have."""
        return stored_bytes(self.tensor.shape, self.type_name)


def planned_types(header: GGUFHeader, log: Iterable[str]) -> list[PlannedType]:
    """Return the type of every tensor of `header`, from the log of llama.cpp's dry run.

    Raises SpecrunError if the log does not name them all.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    planned: dict[str, PlannedType] = {}
    for line in log:
        match = _LINE.match(line)
        if match and match[1] in tensors:
            planned[match[1]] = PlannedType(tensors[match[1]], (match[3] or match[2]).upper())
    missing = next((name for name in tensors if name not in planned), None)
    if missing is not None:
        raise SpecrunError(
            f"llama.cpp's plan says nothing of the tensor {missing}: this is a mistake in specrun"
        )
    return list(planned.values())


def tensor_of_line(line: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the tensor whose turn a line of llama.cpp's log reports, None for other lines."""
    match = _LINE.match(line)
    return tensors.get(match[1]) if match else None


PLAIN = {"F32", "F16", "BF16"}
"""Types that need no quantizer."""


def check_importance(model: Path, plan: Sequence[PlannedType], options: QuantizeOptions) -> int:
    """Return how many matrices get quantized without an entry in the importance matrix.

    The token embedding and output matrices, which have none by default, do not count. Raises
    OptionError if a type needs a matrix and there is none, PairError if it has entries of another
    model or lacks one that is needed.
    """
    tensors = {planned.tensor.name: planned.tensor for planned in plan}
    for name, means in options.importance.items():
        _check_entry(model, name, tensors.get(name), means.size)
    changed = [planned for planned in plan if planned.changes and planned.type_name not in PLAIN]
    missing = [planned for planned in changed if planned.tensor.name not in options.importance]
    for planned in missing:
        if not needs_importance(planned.tensor.name, planned.type_name, options.file_type):
            continue
        if not options.importance:
            raise OptionError(
                f"{options.file_type} stores {planned.tensor.name} as {planned.type_name}, which "
                "needs an importance "
                "matrix: make one with specrun imatrix, and pass it with --imatrix"
            )
        if planned.tensor.name in TOKEN_MATRICES:
            raise OptionError(
                f"the importance matrix has no entry for {planned.tensor.name}, as usual, and "
                f"{planned.type_name} needs one: "
                "name a larger type with --token-embedding-type or --output-tensor-type"
            )
        raise PairError(
            f"the importance matrix has no entry for {planned.tensor.name}, which {model} needs to "
            f"become {planned.type_name}: was it made for another model, or from too short a text?"
        )
    counted = missing if options.importance else ()
    return sum(planned.tensor.name not in TOKEN_MATRICES for planned in counted)


def n_inputs(tensor: TensorInfo) -> int:
    """Return how many inputs a matrix has, all matrices of a stack of experts together."""
    return tensor.n_elements // (tensor.shape[1] if len(tensor.shape) > 1 else 1)


def _check_entry(model: Path, name: str, tensor: TensorInfo | None, size: int) -> None:
    if tensor is None:
        raise PairError(
            f"the importance matrix is of another model: it has {name}, which {model} lacks"
        )
    wanted = n_inputs(tensor)
    if size != wanted:
        raise PairError(
            f"the importance matrix is of another model: it has {size:,} inputs for {name}, "
            f"where {model} has {wanted:,}"
        )
