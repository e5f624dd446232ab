"""Which positions of a text count when what drafts is trained on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["choosing", "draft_marks"]


def draft_marks(learnt: Tensor, depth: int) -> Tensor:
    """Return [B, T - 2 - depth]: the positions p whose draft counts down to `depth` (from 0).

    `learnt` [B, T] marks the words that count. A draft made from the state at p and the word p + 1 says the words p + 2 to p + 2 + depth: all of them must be the
    model's. The word p + 1 need not be: the first draft of an answer is made after the prompt's last word.
    """
    length = learnt.shape[1] - 2 - depth
    marks = torch.ones(learnt.shape[0], max(0, length), dtype=torch.bool, device=learnt.device)
    for ahead in range(2, depth + 3):
        marks = marks & learnt[:, ahead : ahead + marks.shape[1]]
    return marks


def choosing(learnt: Tensor) -> Tensor:
    """Return [B, T]: the positions whose state chooses a word of `learnt` [B, T], the one after it."""
    return F.pad(learnt[:, 1:], (0, 1))
