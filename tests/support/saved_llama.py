"""Reads back the folders that training writes."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from specrun.train.family.llama import Llama, LlamaShape

__all__ = ["load_folder"]


def load_folder(folder: Path) -> Llama:
    """Read a model back from what `save_folder` wrote."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = LlamaShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        rope_theta=config["rope_theta"],
        rms_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
    )
    model = Llama(shape)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model
