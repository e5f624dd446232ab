"""The loss of chains: each depth's, over the chains that count there, discounted and added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specrun.train.draft_marks import choosing, draft_marks
from specrun.train.learner import LossPart

__all__ = ["chain_loss"]


def chain_loss(
    chains: Iterable[Tensor],
    learnt: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    decay: float,
    *,
    recompute: bool,
) -> LossPart | None:
    """Return sum decay^s loss_s over the depths s of `chains`, states [B, T-1, h] each; None where nothing counts.

    `learnt` [B, T] marks the words that count. `loss` takes the states [n, h] that chains predict and the numbers [n]
    of the positions they stand for, among those `choosing` a word that counts, in reading order. With `recompute` its
    insides are computed again for gradients: laws of all depths would fill the memory.
    """
    order = (choosing(learnt).flatten().long().cumsum(0) - 1).view(learnt.shape)
    total, first = torch.zeros((), device=learnt.device), 0.0
    for depth, predicted in enumerate(chains):
        marks = draft_marks(learnt, depth)
        if not marks.any():
            break
        rows, numbers = predicted[:, : marks.shape[1]][marks], order[:, depth + 1 : depth + 1 + marks.shape[1]][marks]
        found = checkpoint(loss, rows, numbers, use_reentrant=False) if recompute else loss(rows, numbers)
        total = total + decay**depth * found
        first = first if depth else float(found.detach())
    return LossPart("step 1", total, first) if total.requires_grad else None
