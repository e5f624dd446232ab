"""What a quantization will make of each tensor, read from llama.cpp's own log of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specrun.bindings.errors import SpecrunError
from specrun.bindings.gguf_header import GGUFHeader, TensorInfo
from specrun.bindings.gguf_types import stored_bytes

__all__ = ["PlannedType", "planned_types", "tensor_of_line"]

# Such as "[   3/  48] blk.0.attn_k.weight   - [ 4096,  1024,     1,     1], type =    f16, size = ... (q4_K)".
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
        raise SpecrunError(f"llama.cpp's plan says nothing of the tensor {missing}: this is a mistake in specrun")
    return list(planned.values())


def tensor_of_line(line: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the tensor whose turn a line of llama.cpp's log reports, None for other lines."""
    match = _LINE.match(line)
    return tensors.get(match[1]) if match else None
