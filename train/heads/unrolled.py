"""A head's chains below every position of a text at once: its own states, the text's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from specrun.train.heads.attention import KeysValues

__all__ = ["ChainHead", "chain_states"]


class ChainHead(Protocol):
    """A head that goes on from its own states; EAGLE's and EAGLE-3's are."""

    def __call__(
        self, embeddings: Tensor, states: Tensor, earlier: Sequence[KeysValues] = ()
    ) -> tuple[Tensor, KeysValues]:
        """Return the next states and their keys."""


def chain_states(head: ChainHead, embedding: Tensor, ids: Tensor, states: Tensor, depth: int) -> Iterator[Tensor]:
    """Yield the head's states [B, T-1, h] at depths 0 to depth-1 of the chains below each position.

    `ids` are [B, T], `embedding` [words, h], `states` [B, T-1, h] what the first step reads at positions 0 to T-2. The
    state that chain p yields at depth s stands for position p + s + 1, and means nothing from p + s + 1 = T on.
    """
    length = ids.shape[1]
    earlier: list[KeysValues] = []
    for step in range(depth):
        if step > length - 2:
            return
        tokens = F.pad(ids[:, 1 + step :], (0, step))
        states, own = head(embedding[tokens].to(states.dtype), states, earlier)
        earlier.append(own)
        yield states
