"""Hydra's heads (Ankner et al. 2024), named as zankner/Hydra's `hydra_mlp`, `hydra_lm_head`, `prefix_embeding_layer`.

Head i reads the state and the embeddings of the i + 1 words that follow it, side by side. Its first block shrinks them:
res_connection(x) + SiLU(linear(x)); the later ones are Medusa's. Hydra++ puts a decoder layer over the states in front.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.train.heads.attention import Attention, FeedForward, RMSNorm
from specrun.train.heads.medusa_heads import ResidualBlock
from specrun.train.target_shape import TargetShape

__all__ = ["HydraHeads"]


class _GroundedBlock(nn.Module):
    """From [..., (followers + 1) h] to [..., h]; starts as the state alone."""

    def __init__(self, hidden: int, followers: int) -> None:
        super().__init__()
        width = hidden * (followers + 1)
        self.linear = nn.Linear(width, hidden)
        self.res_connection = nn.Linear(width, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.zeros_(self.res_connection.weight)
        nn.init.zeros_(self.res_connection.bias)
        self.res_connection.weight.data[:, :hidden] = torch.eye(hidden)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.res_connection(states) + F.silu(self.linear(states))
        return found


class _PrefixLayer(nn.Module):
    """Llama's layer with both norms."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, states: Tensor) -> Tensor:
        mixed, _ = self.self_attn(self.input_layernorm(states))
        states = states + mixed
        found: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


class _Prefix(nn.Module):
    """A Llama of one layer over states instead of embeddings."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_PrefixLayer(shape)])
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layers[0](states))
        return found


class HydraHeads(nn.Module):
    """`count` grounded heads of `layers` blocks; `output` [words, h] is what their output matrices start from.

    With `prefix` the layout is Hydra++'s: every second place is upstream's dropout, of the given rate.
    """

    def __init__(
        self, shape: TargetShape, count: int, layers: int, output: Tensor, *, prefix: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.prefix_embeding_layer = _Prefix(shape) if prefix else None  # spelt as upstream
        heads: list[nn.Module] = []
        outputs: list[nn.Module] = []
        for head in range(count):
            blocks: list[nn.Module] = [_GroundedBlock(shape.hidden, head + 1)]
            blocks += [ResidualBlock(shape.hidden) for _ in range(layers - 1)]
            linear = nn.Linear(shape.hidden, output.shape[0], bias=False)
            linear.weight.data.copy_(output.detach().float())
            if prefix:
                blocks = [part for block in blocks for part in (nn.Dropout(dropout), block)]
                outputs.append(nn.Sequential(nn.Dropout(dropout), linear))
            else:
                outputs.append(linear)
            heads.append(nn.Sequential(*blocks))
        self.hydra_mlp = nn.ModuleList(heads)
        self.hydra_lm_head = nn.ModuleList(outputs)

    def prefixed(self, states: Tensor) -> Tensor:
        """Return what heads read of the states [B, T, h]."""
        if self.prefix_embeding_layer is None:
            return states
        found: Tensor = self.prefix_embeding_layer(states)
        return found

    def logits(self, head: int, states: Tensor, followers: Tensor) -> Tensor:
        """Return a head's logits [n, words] after states [n, h] and the embeddings [n, (head + 1) h] that follow."""
        found: Tensor = self.hydra_lm_head[head](self.hydra_mlp[head](torch.cat((states, followers), -1)))
        return found
