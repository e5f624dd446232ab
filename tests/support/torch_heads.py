"""Heads as torch modules with the upstream names, and the folders they are published in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

MEDUSA_FILE = "medusa_lm_head"


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class TorchMedusa(nn.ModuleList):
    """Medusa's heads (Cai et al. 2024, arXiv 2401.10774, section 2.1.1), named as upstream names
    them.

    FasterDecoding/Medusa at 11af0aa, medusa/model/medusa_model.py (`medusa_head`): head i is a
    Sequential of one block repeated `blocks` times, its weights shared, and an output matrix.
    Without one the target's is used, as in medusa_model_legacy.py at 2b8020f. `shared=False` gives
    each block weights of its own.
    """

    def __init__(
        self,
        hidden: int,
        vocab_size: int,
        heads: int = 3,
        blocks: int = 1,
        *,
        own_output: bool = True,
        shared: bool = True,
    ) -> None:
        super().__init__()
        for _ in range(heads):
            made = (
                [ResidualBlock(hidden)] * blocks
                if shared
                else [ResidualBlock(hidden) for _ in range(blocks)]
            )
            self.append(
                nn.Sequential(
                    *made, *([nn.Linear(hidden, vocab_size, bias=False)] if own_output else [])
                )
            )
        self.own_output = own_output

    @torch.no_grad()
    def logits(self, features: torch.Tensor, target_output: torch.Tensor) -> torch.Tensor:
        """Logits [head, n, vocab] for final hidden states [n, hidden], in float64."""
        rows = [head.double()(features.double()) for head in self]
        return torch.stack(
            rows if self.own_output else [row @ target_output.double().T for row in rows]
        )


class TorchEagle(nn.Module):
    """EAGLE-1/2's head (Li et al. 2024, arXiv 2401.15077, section 4.1), named as upstream names it.

    SafeAILab/EAGLE at 2174a79, eagle/model/cnets1.py, `Model`: cat(embedding of the token, hidden
    state before it) through fc, then one Llama layer (Touvron et al. 2023) whose input norm is left
    out because its index is 0. HASS (arXiv 2408.15766) is of the same form, `bias=False`.
    `qkv_bias` is that of heads for Qwen2.
    """

    def __init__(
        self,
        hidden: int,
        vocab_size: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        wide: int = 64,
        bias: bool = True,
        qkv_bias: bool = False,
        embedding: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.base, self.epsilon = heads, kv_heads, 5000.0, 1e-5
        kv = hidden // heads * kv_heads
        if embedding:
            self.embed_tokens = nn.Embedding(vocab_size, hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)
        layer = nn.Module()
        layer.self_attn, layer.mlp, layer.post_attention_layernorm = (
            nn.Module(),
            nn.Module(),
            nn.Module(),
        )
        layer.self_attn.q_proj = nn.Linear(hidden, hidden, bias=qkv_bias)
        layer.self_attn.k_proj = nn.Linear(hidden, kv, bias=qkv_bias)
        layer.self_attn.v_proj = nn.Linear(hidden, kv, bias=qkv_bias)
        layer.self_attn.o_proj = nn.Linear(hidden, hidden, bias=False)
        layer.mlp.gate_proj = nn.Linear(hidden, wide, bias=False)
        layer.mlp.up_proj = nn.Linear(hidden, wide, bias=False)
        layer.mlp.down_proj = nn.Linear(wide, hidden, bias=False)
        layer.post_attention_layernorm.weight = nn.Parameter(1 + 0.1 * torch.randn(hidden))
        self.layers = nn.ModuleList([layer])
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
            projection.weight.data *= 3  # so that attention is not nearly even, and counts
        self.config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": wide,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.base,
            "rope_scaling": None,
            "vocab_size": vocab_size,
            "max_position_embeddings": 2048,
            **({} if bias else {"bias": False}),
            **({"qkv_bias": True} if qkv_bias else {}),
        }

    @torch.no_grad()
    def states(
        self,
        tokens: Sequence[int],
        features: torch.Tensor,
        positions: Sequence[int],
        sees: torch.Tensor,
        embed: Any,
    ) -> torch.Tensor:
        """Predicted states [n, hidden] of n pairs, in float64; pair i attends to the pairs j with
        sees[i, j].

        `embed` is the target's embedding matrix, for a head without one.
        """
        layer = self.double().layers[0]
        own = getattr(self, "embed_tokens", None)
        embedded = (torch.tensor(embed) if own is None else own.weight)[list(tokens)].double()
        x = self.fc(torch.cat([embedded, features.double()], -1))
        n, width = len(x), x.shape[-1] // self.heads
        attention = layer.self_attn
        q = self._rotated(attention.q_proj(x).view(n, self.heads, width), positions)
        k = self._rotated(attention.k_proj(x).view(n, self.kv_heads, width), positions)
        v = attention.v_proj(x).view(n, self.kv_heads, width)
        k, v = (shared.repeat_interleave(self.heads // self.kv_heads, 1) for shared in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in (q, k, v)), attn_mask=sees
        )
        x = x + attention.o_proj(mixed.transpose(0, 1).reshape(n, -1))
        normed = (
            x
            * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.epsilon)
            * layer.post_attention_layernorm.weight
        )
        mlp = layer.mlp
        return x + mlp.down_proj(nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))

    def _rotated(self, heads: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        half = heads.shape[-1] // 2
        angles = torch.tensor(positions)[:, None] * self.base ** (
            -torch.arange(half, dtype=torch.float64) / half
        )
        turned = (
            torch.complex(heads[..., :half], heads[..., half:])
            * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.cat([turned.real, turned.imag], -1)


def named(
    head: nn.Module, kind: torch.dtype = torch.float32, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """The state dict as it is published: every name with a tensor of its own."""
    return {
        prefix + name: tensor.detach().to(kind).clone()
        for name, tensor in head.state_dict().items()
    }


def publish(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    file: str = "pytorch_model.bin",
) -> Path:
    """Write config.json and the weights, pickled or as safetensors by the ending of `file`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def medusa_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a Medusa-1 upload; old ones state 2 heads whatever was saved."""
    base = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "someone/tiny-chat",
    }
    return {**base, **changes}
