"""EAGLE's head (Li et al. 2024), named as SafeAILab/EAGLE's `cnets`: `fc`, and one layer without an input norm.

The token embedding is the target's, and so is the output matrix: neither is part of the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specrun.train.heads.attention import Attention, FeedForward, KeysValues, RMSNorm, added_at
from specrun.train.target_shape import TargetShape

__all__ = ["EagleHead"]


class _Layer(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(
        self, states: Tensor, earlier: Sequence[KeysValues], wanted: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        mixed, own = self.self_attn(states, earlier)
        return added_at(wanted, states + mixed, lambda rows: self.mlp(self.post_attention_layernorm(rows))), own


class EagleHead(nn.Module):
    """Predicts the next final hidden state from the one before and the token in between."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=True)
        self.layers = nn.ModuleList([_Layer(shape)])

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the states [B, T, h] after the pairs (state, embedding of the token after it), and their keys.

        `earlier` are the keys of the steps before, where `states` are the head's own predictions. Only states at
        `wanted` [B, T] are whole, where it is given.
        """
        joined = self.fc(torch.cat((embeddings, states), -1))
        found: tuple[Tensor, KeysValues] = self.layers[0](joined, earlier, wanted)
        return found
