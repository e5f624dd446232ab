"""What a head and its file are called: the checkpoint's name, with the kind of head in front."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gguf.utility import size_label

from specrun.convert.model_name import ModelName, name_of, safe_file_name

__all__ = ["head_file_name", "head_name"]


def head_name(folder: Path, kind: str, n_parameters: int) -> ModelName:
    """Return the name of the head in `folder`: a size in that is the target's, the label is the head's own."""
    found = name_of(folder, 0)
    label = size_label(n_parameters, 0, 0, 0)
    if found.name.lower().startswith(kind):
        return dataclasses.replace(found, size_label=label)
    basename = f"{kind}-{found.basename}" if found.basename else None
    return dataclasses.replace(found, name=f"{kind}-{found.name}", basename=basename, size_label=label)


def head_file_name(name: ModelName, encoding: str) -> str:
    """Return the name of the file, `encoding` being its type: medusa-vicuna-7b-v1.3-Q8_0.gguf."""
    return safe_file_name(f"{name.name}-{encoding}")
