"""The memory that distilling a drafter takes, from the sizes in the folders' files alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
# Of each position what a pass without gradients holds at once, beside the keys and values of all layers.
_HIDDEN_IN_PASSING, _FEED_FORWARD_IN_PASSING = 8, 3


def drafter_memory(target: Path, draft: Path, target_dtype: torch.dtype, *, tokens_per_batch: int) -> MemoryNeed:
    """Return what is needed at the widest step, where every position of a batch is an answer's."""
    teaching, learning = (_Sizes.of(read_config(folder)) for folder in (target, draft))
    n_words = max(teaching.n_words, learning.n_words)
    passing = _HIDDEN_IN_PASSING * teaching.hidden + _FEED_FORWARD_IN_PASSING * teaching.feed_forward
    kept = _HIDDEN_PER_LAYER * learning.hidden + _FEED_FORWARD_PER_LAYER * learning.feed_forward
    # The target's keys and values are kept while it writes answers; other passes do without.
    per_target_position = passing + 2 * teaching.layers * teaching.hidden
    return MemoryNeed(
        {
            "target": (_n_parameters(target) + tokens_per_batch * per_target_position) * target_dtype.itemsize,
            # Itself, its gradient, and the two averages of AdamW.
            "drafter and optimizer": _n_parameters(draft) * _FLOAT * 4,
            "laws": tokens_per_batch * n_words * _FLOAT * _ROWS_PER_POSITION,
            "activations": tokens_per_batch * learning.layers * kept * _FLOAT,
        }
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What config.json says of a model's sizes; what it does not say counts nothing."""

    n_words: int
    layers: int
    hidden: int
    feed_forward: int

    @staticmethod
    def of(config: Mapping[str, object]) -> _Sizes:
        def size(name: str) -> int:
            value = config.get(name)
            return value if isinstance(value, int) else 0

        hidden = size("hidden_size")
        inner = size("intermediate_size") or 4 * hidden
        return _Sizes(size("vocab_size"), size("num_hidden_layers"), hidden, inner)


def _n_parameters(folder: Path) -> int:
    return sum(prod(tensor.shape) for tensor in open_checkpoint(folder).tensors.values())
