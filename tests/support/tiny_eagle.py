"""A tiny EAGLE head as a GGUF file, and a numpy reference of what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TinyEagle:
    """Weights by name, [out, in], under the names of the GGUF file without `eagle.`; biases and
    norms are vectors.

    Reference: SafeAILab/EAGLE, eagle/model/cnets1.py, `Model.forward`: cat(embedding, hidden state)
    in that order, fc, one LlamaDecoderLayer whose input norm is left out for layer 0. Float64 here.
    """

    weights: dict[str, np.ndarray]
    n_heads: int
    n_kv_heads: int
    rope_base: float = 10000.0
    eps: float = 1e-6

    @property
    def hidden(self) -> int:
        return self.weights["fc.weight"].shape[0]

    def states(
        self,
        embeddings: np.ndarray,
        features: np.ndarray,
        positions: Sequence[int],
        sees: np.ndarray,
    ) -> np.ndarray:
        """Predicted states [n, h] of n pairs at once; pair i attends to the pairs j with
        sees[i, j]."""
        w = {name: weight.astype(np.float64) for name, weight in self.weights.items()}
        x = np.concatenate([embeddings, features], 1).astype(np.float64) @ w["fc.weight"].T + w.get(
            "fc.bias", 0.0
        )
        n, d = len(x), self.hidden // self.n_heads
        q, k, v = (
            x @ w[f"attn_{name}.weight"].T + w.get(f"attn_{name}.bias", 0.0) for name in "qkv"
        )
        q = self._rotated(q.reshape(n, self.n_heads, d), positions)
        k = self._rotated(k.reshape(n, self.n_kv_heads, d), positions)
        v = v.reshape(n, self.n_kv_heads, d)
        group = self.n_heads // self.n_kv_heads
        mixed = np.zeros((n, self.n_heads, d))
        for head in range(self.n_heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(d)
            scores = np.where(sees, scores, -np.inf)
            shares = np.exp(scores - scores.max(1, keepdims=True))
            mixed[:, head] = shares / shares.sum(1, keepdims=True) @ v[:, head // group]
        x = x + mixed.reshape(n, -1) @ w["attn_output.weight"].T
        normed = x / np.sqrt((x**2).mean(1, keepdims=True) + self.eps) * w["ffn_norm.weight"]
        gate = normed @ w["ffn_gate.weight"].T
        return (
            x
            + (gate / (1 + np.exp(-gate)) * (normed @ w["ffn_up.weight"].T))
            @ w["ffn_down.weight"].T
        )

    def _rotated(self, heads: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        half = heads.shape[-1] // 2
        angles = np.asarray(positions)[:, None] * self.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = heads[..., :half], heads[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def write(self, path: Path, n_vocab: int, **changes: Any) -> Path:
        gguf = __import__("gguf")
        writer = gguf.GGUFWriter(path, changes.get("architecture", "eagle"))
        sizes = {
            "embedding_length": self.hidden,
            "vocab_size": n_vocab,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "feed_forward_length": self.weights["ffn_gate.weight"].shape[0],
        }
        for name, value in {**sizes, **{k: v for k, v in changes.items() if k in sizes}}.items():
            writer.add_uint32(f"eagle.{name}", value)
        writer.add_float32("eagle.rope.freq_base", self.rope_base)
        writer.add_float32("eagle.attention.layer_norm_rms_epsilon", self.eps)
        kind = gguf.GGMLQuantizationType[changes.get("quantization", "F32")]
        for name, array in self.weights.items():
            if name == changes.get("without"):
                continue
            if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
                writer.add_tensor(
                    f"eagle.{name}", gguf.quants.quantize(array, kind), raw_dtype=kind
                )
            else:
                writer.add_tensor(f"eagle.{name}", np.ascontiguousarray(array, np.float32))
        if "draft_tokens" in changes:
            writer.add_tensor("draft_tokens", changes["draft_tokens"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def random_eagle(
    hidden: int,
    *,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    wide: int = 64,
    bias: bool = True,
    seed: int = 0,
) -> TinyEagle:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    kv = hidden // n_heads * n_kv_heads
    weights = {
        "fc.weight": normal(hidden, 2 * hidden),
        "attn_q.weight": normal(hidden, hidden),
        "attn_k.weight": normal(kv, hidden),
        "attn_v.weight": normal(kv, hidden),
        "attn_output.weight": normal(hidden, hidden),
        "ffn_norm.weight": 1 + 0.1 * rng.normal(size=hidden).astype(np.float32),
        "ffn_gate.weight": normal(wide, hidden),
        "ffn_up.weight": normal(wide, hidden),
        "ffn_down.weight": normal(hidden, wide),
    }
    if bias:
        weights["fc.bias"] = normal(hidden)
    return TinyEagle(weights, n_heads, n_kv_heads)


def read_eagle(path: Path) -> TinyEagle:
    """The head of a file that `write` made in F32."""
    gguf = __import__("gguf")
    reader = gguf.GGUFReader(path)

    def number(name: str) -> float:
        return reader.fields[f"eagle.{name}"].contents()

    weights = {
        tensor.name.removeprefix("eagle."): np.array(tensor.data) for tensor in reader.tensors
    }
    heads, kv_heads = int(number("attention.head_count")), int(number("attention.head_count_kv"))
    return TinyEagle(
        weights,
        heads,
        kv_heads,
        number("rope.freq_base"),
        number("attention.layer_norm_rms_epsilon"),
    )
