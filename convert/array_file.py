"""Reads an array out of a file, at once: not mapped, because a mapped file that shrinks ends the process."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import FileMissingError, MalformedFileError

__all__ = ["read_array"]


def read_array(path: Path, kind: npt.DTypeLike, shape: tuple[int, ...], offset: int) -> npt.NDArray[Any]:
    """Return the array of `shape` whose numbers begin `offset` bytes into the file.

    Raises MalformedFileError if the file ends before, FileMissingError if it cannot be read.
    """
    try:
        array: npt.NDArray[Any] = np.fromfile(path, kind, count=prod(shape), offset=offset)
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read any more ({error.strerror})") from error
    if array.size != prod(shape):
        raise MalformedFileError(f"{path} became shorter while it was read")
    return array.reshape(shape)
