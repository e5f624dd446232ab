"""A Llama in plain torch, named like Hugging Face's, so that the saved folder is an ordinary
checkpoint.

Next-token cross entropy of a whole Llama, and its recall of what it learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.train.data.token_corpus import TokenBatch
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of one model; widths must be divisible by 256 for K-quants."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6
    intermediate_size: int = 1024
    num_heads: int = 4
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    max_positions: int = 2048

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learnt scale, over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to the same shape."""
        return F.rms_norm(hidden.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def rope_tables(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of positions from 0, both halves of a head alike (HF's
    layout)."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, heads, T, head_dim] by the tables' T rows: component i pairs with i +
    head_dim/2."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, width] to the same shape."""
        batch, length, width = hidden.shape
        split = (batch, length, self.shape.num_heads, self.shape.head_dim)
        queries, keys, values = (
            projection(hidden).view(split).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(queries, cos, sin), rotate(keys, cos, sin), values, is_causal=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each on a normed input and added to the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, width] to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Backbone(nn.Module):
    """Everything below the output head; called `model` in the checkpoint."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] to normed hidden states [B, T, width]."""
        cos, sin = (table.to(ids.device) for table in rope_tables(self.shape, ids.shape[1]))
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        out: Tensor = self.norm(hidden)
        return out


class Llama(nn.Module):
    """A Llama with tied embeddings."""

    def __init__(self, shape: LlamaShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * shape.num_layers) ** 0.5 if small else 0.02
                with torch.no_grad():
                    parameter.normal_(0.0, std, generator=generator)

    def head(self, hidden: Tensor) -> Tensor:
        """Normed states [..., width] to logits [..., vocab]."""
        return hidden @ self.model.embed_tokens.weight.T

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] to logits [B, T, vocab]."""
        return self.head(self.model(ids))

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy over the positions whose label is not -1; logits are made only
        there."""
        wanted = labels >= 0
        logits = self.head(self.model(ids)[wanted])
        return F.cross_entropy(logits.float(), labels[wanted])


class LlamaLearner(Learner):
    """Trains all of `model`, embeddings and norms at `other_rate` times the matrices' rate."""

    def __init__(self, model: Llama, *, other_rate: float = 0.5) -> None:
        self.module = self.model = model
        self.device = next(model.parameters()).device
        self._other_rate = other_rate

    def groups(self) -> list[ParameterGroup]:
        """Return the hidden matrices, which Muon may train, and the rest."""
        named = list(self.model.named_parameters())
        hidden = [weights for name, weights in named if weights.ndim == 2 and "embed" not in name]
        others = [weights for name, weights in named if weights.ndim != 2 or "embed" in name]
        return [
            ParameterGroup(hidden, hidden_matrices=True),
            ParameterGroup(others, rate=self._other_rate),
        ]

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the mean cross entropy of the tokens to be learnt, each given those before it."""
        loss = self.model.loss(batch.ids[:, :-1], next_labels(batch))
        yield LossPart("cross entropy", loss, float(loss.detach()))

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return greedy recall: shares of `exact` answers, right to the letter, and right `tokens`.

        One forward pass over the right answer is enough: greedy decoding gives it exactly when
        every token of it is the most probable given those before it.
        """
        exact = n_answers = right = n_tokens = 0
        for batch in batches:
            labels = next_labels(batch)
            wanted = labels >= 0
            hits = (self.model(batch.ids[:, :-1]).argmax(-1) == labels) & wanted
            exact += int((hits == wanted).all(dim=1).sum())
            n_answers += len(wanted)
            right += int(hits.sum())
            n_tokens += int(wanted.sum())
        return {"exact": exact / max(1, n_answers), "tokens": right / max(1, n_tokens)}


def next_labels(batch: TokenBatch) -> Tensor:
    """Return [B, T - 1]: the token after each position where that is to be learnt, -1 elsewhere."""
    return torch.where(batch.learnt[:, 1:], batch.ids[:, 1:], -1)
