"""A tensor of a checkpoint that stays in its file until it is read, whole or in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.convert.bfloat16 import widened

__all__ = ["NUMBER_TYPES", "SourceTensor"]

NUMBER_TYPES: dict[str, npt.DTypeLike] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "BOOL": "|b1",
}
"""The number types of checkpoints that can be read, with the numpy type that holds them; BF16 as its 16 bits."""


@dataclass(frozen=True, slots=True)
class SourceTensor(ABC):
    """What is known of a tensor before it is read: `type_name` is one of NUMBER_TYPES, `shape` rows first."""

    path: Path
    name: str
    type_name: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """How many bytes its numbers take in the checkpoint."""
        return self.n_elements * np.dtype(NUMBER_TYPES[self.type_name]).itemsize

    @abstractmethod
    def raw(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return `count` numbers from number `start` on, flat, in the numpy type of `type_name`.

        May be called from several threads. Raises MalformedFileError if the file has become shorter,
        FileMissingError if it is gone.
        """

    def read(self) -> npt.NDArray[Any]:
        """Return all numbers in their shape; BF16 is widened to float32. Raises as `raw` does."""
        return self.as_numbers(self.raw(0, self.n_elements))

    def as_numbers(self, raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what `read` would, from all of the raw numbers."""
        return (widened(raw) if self.type_name == "BF16" else raw).reshape(self.shape)
