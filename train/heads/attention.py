"""One decoder layer's parts, with attention that can be unrolled over a head's own predictions.

A head that reads its own predictions drafts a chain below every position at once: chain p at depth
s stands at position p + s and sees the pairs 0..p of the text, and its own earlier steps 1..s. Keys
of the text are masked as usual; of each earlier step a chain sees the one entry that is its own
(EAGLE-3's training-time test, HASS's harmonised context).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.train.family.llama import rotate
from specrun.train.target.target_shape import TargetShape


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Rotated keys and values of one step, [B, heads, T, head size] each."""

    keys: Tensor
    values: Tensor


def rope_angles(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, size] of positions [T], both halves of a head alike."""
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    angles = torch.outer(positions.float(), theta**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output; named as in Hugging Face's
    Llama."""

    def __init__(self, shape: TargetShape, input_width: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.head_size = shape.hidden // shape.n_heads
        width, kv = input_width or shape.hidden, shape.n_kv_heads * self.head_size
        self.q_proj = nn.Linear(width, shape.hidden, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(
        self, states: Tensor, earlier: Sequence[KeysValues] = ()
    ) -> tuple[Tensor, KeysValues]:
        """Return the mixed states [B, T, hidden] of step `len(earlier)`, and its keys and values.

        `states` are [B, T, input width]. Step 0 is ordinary causal attention.
        """
        batch, length, _ = states.shape
        shape, depth = self.shape, len(earlier)
        cos, sin = rope_angles(
            torch.arange(depth, depth + length, device=states.device),
            self.head_size,
            shape.rope_theta,
        )

        def split(linear: nn.Linear, heads: int) -> Tensor:
            return linear(states).view(batch, length, heads, self.head_size).transpose(1, 2)  # type: ignore[no-any-return]

        group = shape.n_heads // shape.n_kv_heads
        values = split(self.v_proj, shape.n_kv_heads).repeat_interleave(group, 1)
        # Rotation is computed in float32, whatever the precision of products.
        query = rotate(split(self.q_proj, shape.n_heads), cos, sin).to(values.dtype)
        keys = (
            rotate(split(self.k_proj, shape.n_kv_heads), cos, sin)
            .to(values.dtype)
            .repeat_interleave(group, 1)
        )
        own = KeysValues(keys, values)
        if not earlier:
            mixed = F.scaled_dot_product_attention(query, own.keys, own.values, is_causal=True)
        else:
            mixed = _unrolled(query, earlier[0], [*earlier[1:], own])
        joined = mixed.transpose(1, 2).reshape(batch, length, shape.hidden)
        return self.o_proj(joined.to(states.dtype)), own


def _unrolled(query: Tensor, text: KeysValues, chain: Sequence[KeysValues]) -> Tensor:
    """Attention of every position's chain to the text up to that position, and to the chain's own
    steps."""
    length = query.shape[2]
    scale = 1 / math.sqrt(query.shape[-1])
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ text.keys.transpose(2, 3)).masked_fill(future, float("-inf"))
    own = [(query * step.keys).sum(-1, keepdim=True) for step in chain]
    weights = (
        torch.cat([scores, *own], -1).mul(scale).softmax(-1, dtype=torch.float32).to(query.dtype)
    )
    mixed = weights[..., :length] @ text.values
    for place, step in enumerate(chain):
        mixed = mixed + weights[..., length + place, None] * step.values
    return mixed


class FeedForward(nn.Module):
    """SwiGLU, named as in Hugging Face's Llama."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        gated: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return gated


def added_at(places: Tensor | None, states: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `states` [B, T, h] plus `part` of them at `places` [B, T], None for all; the others
    stay as they are."""
    if places is None:
        return states + part(states)
    more = torch.zeros_like(states)
    more[places] = part(states[places]).to(states.dtype)
    return states + more
