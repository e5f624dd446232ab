"""Pickled checkpoints (.bin, .pt, .pth), opened by torch with `weights_only=True` only.

A pickle is a program. `weights_only` lets it build tensors and plain containers and nothing else;
where it refuses a file, the file is refused: there is no second try.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import (
    MalformedFileError,
    MissingPackageError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.files import open_regular
from specrun.convert.checkpoint.json_file import named_errors
from specrun.convert.checkpoint.source_tensor import NUMBER_TYPES, SourceTensor

PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
# Before 2.6 a file could get around weights_only (CVE-2025-32434).
_SAFE_TORCH = (2, 6)
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TYPES |= {"int64": "I64", "int32": "I32", "bool": "BOOL"}
# What torch raises for damaged files, beside OSError.
_DAMAGED = (RuntimeError, ValueError, EOFError, OSError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class PickledTensor(SourceTensor):
    """A tensor that torch has mapped from its file: pages are read when their numbers are."""

    tensor: Any

    def raw(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return a view of a piece, as `SourceTensor.raw` says."""
        import torch

        flat = self.tensor.reshape(-1)[start : start + count]
        if self.type_name == "BF16":
            flat = flat.view(torch.uint16)
        array: npt.NDArray[Any] = flat.numpy()
        return array.astype(np.dtype(NUMBER_TYPES[self.type_name]), copy=False)


def read_pickle(path: Path) -> dict[str, PickledTensor]:
    """Open a pickled state dict and return its tensors by name; their numbers stay in the file.

    Raises FileMissingError, MalformedFileError, UnsupportedModelError for what is not a mapping of
    names to tensors or asks for more than tensors, SpecrunError where torch is missing or too old
    to open it safely.
    """
    content = _load(path)
    for inner in ("state_dict", "model"):  # as training programs wrap it
        if isinstance(content, Mapping) and isinstance(content.get(inner), Mapping):
            content = content[inner]
    if not isinstance(content, Mapping) or not content:
        raise UnsupportedModelError(f"{path} holds a {type(content).__name__}, not tensors by name")
    return {str(name): _pickled(path, str(name), tensor) for name, tensor in content.items()}


def _load(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"opening {path}", "torch", "train") from error
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _SAFE_TORCH:
        raise SpecrunError(f"torch {torch.__version__} cannot open {path} safely: get 2.6 or later")
    with named_errors(path), open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
    if size and not zipfile.is_zipfile(path):
        raise UnsupportedModelError(
            f"{path} is not a file that torch 1.6 or later saved, or is truncated: "
            "get the checkpoint as safetensors, or download it again"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedModelError(
            f"{path} asks for more than tensors, which could run code: nothing of it was run; "
            "get the checkpoint as safetensors"
        ) from error
    except _DAMAGED as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise MalformedFileError(f"{path} is damaged ({reason}); download it again") from error


def _pickled(path: Path, name: str, tensor: Any) -> PickledTensor:  # noqa: ANN401 - anything
    kind = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if kind not in _TYPES or str(tensor.layout) != "torch.strided":
        known = ", ".join(_TYPES)
        raise UnsupportedModelError(f"{path} stores {name} as {kind}: only dense {known} are read")
    if tensor.numel() == 0:
        raise MalformedFileError(f"{path} is damaged: {name} is empty; download it again")
    return PickledTensor(path, name, _TYPES[kind], tuple(tensor.shape), tensor.detach())
