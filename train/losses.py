"""The losses of heads, over rows [n, words] or [n, width]; each returns the mean over rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["divergence_from_law", "law_cross_entropy", "word_cross_entropy"]


def word_cross_entropy(logits: Tensor, words: Tensor) -> Tensor:
    """Return the mean of -log q(word)."""
    return F.cross_entropy(logits.float(), words)


def law_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """Return the mean of -sum p log q, for laws p [n, words]."""
    found: Tensor = -(law * logits.float().log_softmax(-1)).sum(-1).mean()
    return found


def divergence_from_law(logits: Tensor, law: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of q from p, sum p log(p / q); 0 log 0 is 0."""
    entropy: Tensor = torch.special.entr(law).sum(-1).mean()
    return law_cross_entropy(logits, law) - entropy
