"""A drafter's GGUF file in torch and back: weights to learn with, and a new file of the same form.

Only plain Llamas can be read back from GGUF; of any other architecture the Hugging Face folder that
the file was converted from is what learns.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specrun.bindings.errors import UnsupportedModelError
from specrun.convert.gguf import GGUFSource
from specrun.convert.gguf.gguf_source import write_renumbered
from specrun.train.target.from_gguf import gguf_numbers, llama_config, load_llama_file
from specrun.train.target.hf_model import HFModel


def check_drafter(path: Path) -> None:
    """Raise UnsupportedModelError, with what to do, unless a drafter's file can learn."""
    try:
        llama_config(GGUFSource(path))
    except UnsupportedModelError as error:
        advice = "train its Hugging Face folder: specrun train drafter --online BUFFER --draft DIR"
        raise UnsupportedModelError(f"{error}; {advice}") from error


def load_drafter(path: Path, device: torch.device) -> HFModel:
    """Return the model in a GGUF file, float32; raises as `check_drafter` and `load_llama_file`."""
    check_drafter(path)
    return load_llama_file(path, device)


def write_drafter(draft: HFModel, source: Path, output: Path) -> int:
    """Write what a drafter has learnt as `source` is: each tensor in its type; return the bytes.

    The file appears whole or not at all.
    """
    file = GGUFSource(source)
    weights = dict(draft.module.state_dict())
    return write_renumbered(file, output, gguf_numbers(file, weights), force=True)
