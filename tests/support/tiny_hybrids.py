"""Tiny random hybrid models: lfm2 (short convolutions), nemotron_h (Mamba 2) and qwen35moe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from support.tiny_nextn import Tensors, _metadata, _write, write_tiny_qwen35

WIDTH, FFN, LAYERS, VOCAB = 64, 48, 4, 320
HEADS, KV_HEADS, HEAD = 4, 2, 16
INNER, STATE, SSM_HEADS, GROUPS, KERNEL = 64, 16, 4, 2, 4


class _Draws:
    """Random tensors, rows first."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, *shape: int, spread: float = 1.0) -> np.ndarray:
        numbers = self._random.standard_normal(shape) * spread * shape[-1] ** -0.5
        return numbers.astype(np.float32)

    def norm(self, *shape: int) -> np.ndarray:
        return (1.0 + 0.1 * self._random.standard_normal(shape)).astype(np.float32)

    def attention(self, block: str) -> Tensors:
        return {
            block + "attn_q.weight": self.matrix(HEADS * HEAD, WIDTH),
            block + "attn_k.weight": self.matrix(KV_HEADS * HEAD, WIDTH),
            block + "attn_v.weight": self.matrix(KV_HEADS * HEAD, WIDTH),
            block + "attn_output.weight": self.matrix(WIDTH, HEADS * HEAD),
        }


def write_tiny_lfm2(path: Path, *, seed: int = 0) -> Path:
    """Write a random lfm2: three layers of convolutions, whose last inputs are its state."""
    draw = _Draws(seed)
    made = {
        "token_embd.weight": draw.matrix(VOCAB, WIDTH, spread=WIDTH**0.5),
        "token_embd_norm.weight": draw.norm(WIDTH),
        "output.weight": draw.matrix(VOCAB, WIDTH, spread=3.0),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        made |= {block + f"{name}_norm.weight": draw.norm(WIDTH) for name in ("attn", "ffn")}
        made |= {block + f"ffn_{name}.weight": draw.matrix(FFN, WIDTH) for name in ("gate", "up")}
        made[block + "ffn_down.weight"] = draw.matrix(WIDTH, FFN)
        if layer == 2:
            made |= draw.attention(block)
            made |= {block + f"attn_{name}_norm.weight": draw.norm(HEAD) for name in "qk"}
            continue
        made |= {
            block + "shortconv.conv.weight": draw.matrix(WIDTH, 3),
            block + "shortconv.in_proj.weight": draw.matrix(3 * WIDTH, WIDTH),
            block + "shortconv.out_proj.weight": draw.matrix(WIDTH, WIDTH),
        }
    metadata = _metadata("lfm2", VOCAB, 512, WIDTH, LAYERS, FFN)
    metadata.count("lfm2.attention.head_count", HEADS)
    metadata.integers("lfm2.attention.head_count_kv", [0, 0, KV_HEADS, 0])
    metadata.count("lfm2.shortconv.l_cache", 3)
    _write(path, "lfm2", metadata, made)
    return path


def write_tiny_nemotron_h(path: Path, *, seed: int = 0) -> Path:
    """Write a random nemotron_h: two layers of Mamba 2, one of attention, one feed-forward."""
    draw = _Draws(seed)
    made = {
        "token_embd.weight": draw.matrix(VOCAB, WIDTH, spread=WIDTH**0.5),
        "output_norm.weight": draw.norm(WIDTH),
        "output.weight": draw.matrix(VOCAB, WIDTH, spread=3.0),
    }
    convolved = INNER + 2 * GROUPS * STATE
    for layer, kind in enumerate(("state", "attention", "state", "ffn")):
        block = f"blk.{layer}."
        made[block + "attn_norm.weight"] = draw.norm(WIDTH)
        if kind == "attention":
            made |= draw.attention(block)
        elif kind == "ffn":
            made[block + "ffn_up.weight"] = draw.matrix(FFN, WIDTH)
            made[block + "ffn_down.weight"] = draw.matrix(WIDTH, FFN)
        else:
            made |= {
                block + "ssm_in.weight": draw.matrix(INNER + convolved + SSM_HEADS, WIDTH),
                block + "ssm_conv1d.weight": draw.matrix(convolved, KERNEL),
                block + "ssm_conv1d.bias": draw.matrix(convolved),
                block + "ssm_dt.bias": draw.matrix(SSM_HEADS),
                block + "ssm_a": -np.exp(draw.matrix(SSM_HEADS, 1)),
                block + "ssm_d": draw.norm(SSM_HEADS, 1),
                block + "ssm_norm.weight": draw.norm(GROUPS, INNER // GROUPS),
                block + "ssm_out.weight": draw.matrix(WIDTH, INNER),
            }
    metadata = _metadata("nemotron_h", VOCAB, 512, WIDTH, LAYERS, FFN)
    metadata.integers("nemotron_h.feed_forward_length", [0, 0, 0, FFN])
    metadata.integers("nemotron_h.attention.head_count_kv", [0, KV_HEADS, 0, 0])
    metadata.count("nemotron_h.attention.head_count", HEADS)
    metadata.number("nemotron_h.attention.layer_norm_epsilon", 1e-5)
    metadata.count("nemotron_h.rope.dimension_count", HEAD)
    metadata.count("nemotron_h.ssm.conv_kernel", KERNEL)
    metadata.count("nemotron_h.ssm.inner_size", INNER)
    metadata.count("nemotron_h.ssm.state_size", STATE)
    metadata.count("nemotron_h.ssm.time_step_rank", SSM_HEADS)
    metadata.count("nemotron_h.ssm.group_count", GROUPS)
    _write(path, "nemotron_h", metadata, made)
    return path


HYBRIDS: dict[str, Callable[[Path], Path]] = {
    "qwen35": write_tiny_qwen35,
    "qwen35moe": partial(write_tiny_qwen35, experts=4),
    "lfm2": write_tiny_lfm2,
    "nemotron_h": write_tiny_nemotron_h,
}
