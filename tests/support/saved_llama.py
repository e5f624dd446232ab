"""Reads back the folders that training writes."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from family.llama import Llama
from specrun.train.target.shape import target_shape

__all__ = ["load_folder"]


def load_folder(folder: Path) -> Llama:
    """Read a model back from what `save_folder` wrote."""
    model = Llama(target_shape(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model
