"""A head's chains below every position of a text at once: its own states, the text's tokens.

The loss of chains: each depth's, over the chains that count there, discounted and added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specrun.train.data.token_corpus import choosing, draft_marks
from specrun.train.heads.attention import KeysValues
from specrun.train.trainer.learner import LossPart


class ChainHead(Protocol):
    """A head that goes on from its own states; EAGLE's and EAGLE-3's are."""

    def __call__(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the next states, whole at `wanted`, and their keys."""


def chain_states(
    head: ChainHead,
    embedding: Tensor,
    ids: Tensor,
    states: Tensor,
    depth: int,
    *,
    learnt: Tensor | None = None,
    recompute: bool = True,
) -> Iterator[Tensor]:
    """Yield the head's states [B, T-1, h] at depths 0 to depth-1 of the chains below each position.

    `ids` are [B, T], `embedding` [vocab, h], `states` [B, T-1, h] what the first step reads at
    positions 0 to T-2. The state that chain p yields at depth s stands for position p + s + 1, and
    means nothing from p + s + 1 = T on. With `learnt` [B, T], states are whole only where
    `draft_marks` counts them: half of a chat is questions.

    With `recompute`, while gradients are taken over several steps, each step is computed again for
    its own: what attention keeps of all steps together would be the largest part of the memory.
    """
    length = ids.shape[1]
    earlier: list[KeysValues] = []
    for step in range(depth):
        if step > length - 2:
            return
        tokens = F.pad(ids[:, 1 + step :], (0, step))
        embeddings = embedding[tokens].to(states.dtype)
        wanted = None if learnt is None else F.pad(draft_marks(learnt, step), (0, step + 1))
        if recompute and depth > 1 and torch.is_grad_enabled():
            states, own = checkpoint(
                head, embeddings, states, tuple(earlier), wanted, use_reentrant=False
            )
        else:
            states, own = head(embeddings, states, earlier, wanted)
        earlier.append(own)
        yield states


def chain_loss(
    chains: Iterable[Tensor],
    learnt: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    decay: float,
    *,
    recompute: bool,
) -> LossPart | None:
    """Return sum decay^s loss_s over the depths s of `chains`, states [B, T-1, h] each; None where
    nothing counts.

    `learnt` [B, T] marks the tokens that count. `loss` takes the states [n, h] that chains predict
    and the numbers [n] of the positions they stand for, among those `choosing` a token that counts,
    in reading order. With `recompute` its insides are computed again for gradients: laws of all
    depths would fill the memory.
    """
    order = (choosing(learnt).flatten().long().cumsum(0) - 1).view(learnt.shape)
    total, first = torch.zeros((), device=learnt.device), 0.0
    for depth, predicted in enumerate(chains):
        marks = draft_marks(learnt, depth)
        if not marks.any():
            break
        rows, numbers = (
            predicted[:, : marks.shape[1]][marks],
            order[:, depth + 1 : depth + 1 + marks.shape[1]][marks],
        )
        found = (
            checkpoint(loss, rows, numbers, use_reentrant=False)
            if recompute
            else loss(rows, numbers)
        )
        total = total + decay**depth * found
        first = first if depth else float(found.detach())
    return LossPart("step 1", total, first) if total.requires_grad else None
