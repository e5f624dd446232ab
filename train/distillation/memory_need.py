"""The memory that distilling a drafter takes, from the sizes in the folders' files alone."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from specrun.convert.checkpoint import open_checkpoint
from specrun.train.hf_model import read_config
from specrun.train.memory import MemoryNeed

__all__ = ["drafter_memory"]

_FLOAT = 4
# Of each position the laws of two models, their logarithms, what a divergence keeps of them, and gradients.
_ROWS_PER_POSITION = 12
# Of each position and layer what the gradient needs: in widths of the hidden state, and of the feed-forward layer.
_HIDDEN_PER_LAYER, _FEED_FORWARD_PER_LAYER = 16, 4


def drafter_memory(target: Path, draft: Path, target_dtype: torch.dtype, *, tokens_per_batch: int) -> MemoryNeed:
    """Return what is needed at the widest step, where every position of a batch is an answer's."""
    config = read_config(draft)
    n_words = max(_size(read_config(folder), "vocab_size") for folder in (target, draft))
    layers, width = _size(config, "num_hidden_layers"), _size(config, "hidden_size")
    inner = _size(config, "intermediate_size") or 4 * width
    per_layer = _HIDDEN_PER_LAYER * width + _FEED_FORWARD_PER_LAYER * inner
    return MemoryNeed(
        {
            "target": _n_parameters(target) * target_dtype.itemsize,
            # Itself, its gradient, and the two averages of AdamW.
            "drafter and optimizer": _n_parameters(draft) * _FLOAT * 4,
            "laws": tokens_per_batch * n_words * _FLOAT * _ROWS_PER_POSITION,
            "activations": tokens_per_batch * layers * per_layer * _FLOAT,
        }
    )


def _n_parameters(folder: Path) -> int:
    return sum(prod(tensor.shape) for tensor in open_checkpoint(folder).tensors.values())


def _size(config: dict[str, object], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0
