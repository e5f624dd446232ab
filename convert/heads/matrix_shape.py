"""The shape of a matrix of a checkpoint that other shapes follow from."""

from __future__ import annotations

from specrun.bindings.errors import MalformedFileError
from specrun.convert.checkpoint import Checkpoint

__all__ = ["matrix_shape"]


def matrix_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Return rows and columns of a tensor; raises MalformedFileError where it is missing or no matrix."""
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise MalformedFileError(f"{checkpoint.folder} has no tensor {name}: it is incomplete, or another kind of head")
    if len(stored.shape) != 2:
        raise MalformedFileError(f"{stored.path} has {name} of shape {stored.shape}, which is no matrix")
    return stored.shape[0], stored.shape[1]
