"""The parts of Llama's decoder layer in torch, for heads and for whole models.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, named as in Hugging Face's Llama.

Attention can be unrolled over a head's own predictions. A head that reads its own predictions
drafts a chain below every position at once: chain p at depth s stands at position p + s and sees
the pairs 0..p of the text, and its own earlier steps 1..s. Keys of the text are masked as usual; of
each earlier step a chain sees the one entry that is its own (EAGLE-3's training-time test, HASS's
harmonised context).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.train.target.shape import ModelShape


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learnt scale, over the last axis."""

    def __init__(self, shape: ModelShape, width: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width or shape.hidden))
        self.eps = shape.norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to the same shape."""
        return F.rms_norm(hidden.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def rope_angles(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, size] of positions [T], both halves of a head alike."""
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    angles = torch.outer(positions.float(), theta**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, heads, T, size] by T rows of angles: component i pairs with i + size / 2."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Rotated keys and values of one step, [B, heads, T, head size] each."""

    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; its input may be wider than its output."""

    def __init__(self, shape: ModelShape, input_width: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        width, kv = input_width or shape.hidden, shape.n_kv_heads * shape.head_size
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
        # All chains move on together: at step s chain p stands at position p + s.
        positions = torch.arange(depth, depth + length, device=states.device)
        cos, sin = rope_angles(positions, shape.head_size, shape.rope_theta)

        def split(linear: nn.Linear, heads: int) -> Tensor:
            return linear(states).view(batch, length, heads, shape.head_size).transpose(1, 2)  # type: ignore[no-any-return]

        group = shape.n_heads // shape.n_kv_heads
        values = split(self.v_proj, shape.n_kv_heads).repeat_interleave(group, 1)
        # Rotation is computed in float32, whatever the precision of products.
        query = rotate(split(self.q_proj, shape.n_heads), cos, sin).to(values.dtype)
        keys = rotate(split(self.k_proj, shape.n_kv_heads), cos, sin).to(values.dtype)
        own = KeysValues(keys.repeat_interleave(group, 1), values)
        if not earlier:
            mixed = F.scaled_dot_product_attention(query, own.keys, own.values, is_causal=True)
        else:
            mixed = _unrolled(query, earlier[0], [*earlier[1:], own])
        joined = mixed.transpose(1, 2).reshape(batch, length, shape.hidden)
        return self.o_proj(joined.to(states.dtype)), own


def _unrolled(query: Tensor, text: KeysValues, chain: Sequence[KeysValues]) -> Tensor:
    """Attention of every position's chain to the text up to there, and to the chain's own steps."""
    length = query.shape[2]
    # The mask of step 0 at every step: chain p sees the text up to p, not up to its own position.
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ text.keys.transpose(2, 3)).masked_fill(future, float("-inf"))
    # Of its own steps a chain sees one key each: a product of rows, not a matrix of scores.
    own = [(query * step.keys).sum(-1, keepdim=True) for step in chain]
    scaled = torch.cat([scores, *own], -1).mul(1 / math.sqrt(query.shape[-1]))
    # One softmax over [text, own steps]: two would each sum to 1.
    weights = scaled.softmax(-1, dtype=torch.float32).to(query.dtype)
    mixed = weights[..., :length] @ text.values
    for place, step in enumerate(chain):
        mixed = mixed + weights[..., length + place, None] * step.values
    return mixed


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        gated: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return gated


def output_layer(output: Tensor, drafted: Tensor | None = None) -> nn.Linear:
    """Return an output matrix that begins as a target's [vocab, h], or as its rows of tokens.

    In float32 whatever the target's numbers: small updates would be rounded away.
    """
    rows = output.detach() if drafted is None else output.detach()[drafted.to(output.device)]
    layer = nn.Linear(rows.shape[1], len(rows), bias=False)
    layer.weight.data.copy_(rows.float())
    return layer


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on a normed input and added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape)
        self.mlp = FeedForward(shape)

    def forward(self, states: Tensor) -> Tensor:
        """[B, T, hidden] to the same shape."""
        mixed, _ = self.self_attn(self.input_layernorm(states))
        states = states + mixed
        found: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


def added_at(places: Tensor | None, states: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `states` [B, T, h] plus `part` of them at `places` [B, T] (None: all)."""
    if places is None:
        return states + part(states)
    # The feed-forward is most of a layer's work: it is left out at places that are not read.
    more = torch.zeros_like(states)
    more[places] = part(states[places]).to(states.dtype)
    return states + more
