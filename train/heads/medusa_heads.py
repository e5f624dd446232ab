"""Medusa's heads (Cai et al. 2024, section 2.1.1), named as FasterDecoding/Medusa's medusa_lm_head.

Head i is `[ResBlock] * layers + [Linear]`: keys `{i}.{j}.linear.weight`, `{i}.{j}.linear.bias`, `{i}.{layers}.weight`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MedusaHeads", "ResidualBlock"]


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); starts as the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        return states + F.silu(self.linear(states))


class MedusaHeads(nn.ModuleList):
    """`count` heads over final hidden states; head i predicts the word i + 2 places after the state's own token.

    With `output` [words, hidden], each head owns an output matrix that starts as a copy of it, so that an untrained
    head predicts what the target itself would say next. Without it, heads return states for the target's own matrix.
    """

    def __init__(self, hidden: int, count: int, layers: int, output: Tensor | None) -> None:
        heads = []
        for _ in range(count):
            blocks: list[nn.Module] = [ResidualBlock(hidden) for _ in range(layers)]
            if output is not None:
                linear = nn.Linear(hidden, output.shape[0], bias=False)
                linear.weight.data.copy_(output.detach().float())
                blocks.append(linear)
            heads.append(nn.Sequential(*blocks))
        super().__init__(heads)
        self.owns_output = output is not None
