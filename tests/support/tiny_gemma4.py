"""A tiny Gemma 4 and its assistant, and a numpy reference of both.

It follows llama.cpp at 0c1e570 (src/models/gemma4.cpp, gemma4-assistant.cpp): layers with a window
and a narrow head, the last with neither; values are normed keys where a layer has none of its own.
The assistant's layers have queries alone: they attend to the keys and values of the target's last
two layers, at the position behind the text, whatever they draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.convert.random_model import synthetic_vocabulary

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
_EPS = 1e-6
_BASE, _BASE_SWA = 10000.0, 1000.0
_CAP = 30.0


@dataclass(frozen=True)
class _Decoder:
    """The part that both have: layers of `windows`, with heads of two widths."""

    vocab_size: int = 320
    width: int = 32
    heads: int = 4
    kv_heads: tuple[int, int] = (2, 1)  # of layers with a window, and of the others
    head_widths: tuple[int, int] = (8, 16)
    ffn: int = 48
    windows: tuple[bool, ...] = (True, True, False)
    window: int = 12
    context: int = 512
    seed: int = 0
    strength: float = 0.3

    def of_layer(self, pair: tuple[int, int], layer: int) -> int:
        return pair[0 if self.windows[layer] else 1]

    def layer(self, random: np.random.Generator, layer: int, *, keys: bool) -> Tensors:
        w, d = self.width, self.of_layer(self.head_widths, layer)
        q, kv = self.heads * d, self.of_layer(self.kv_heads, layer) * d
        made = {
            "attn_norm": norm(random, w),
            "attn_q": matrix(random, q, w),
            "attn_q_norm": norm(random, d),
            "attn_output": matrix(random, w, q),
            "post_attention_norm": self.strength * norm(random, w),
            "ffn_norm": norm(random, w),
            "ffn_gate": matrix(random, self.ffn, w),
            "ffn_up": matrix(random, self.ffn, w),
            "ffn_down": matrix(random, w, self.ffn),
            "post_ffw_norm": self.strength * norm(random, w),
            "layer_output_scale": np.array([0.9], np.float32),
        }
        if keys:
            made |= {"attn_k": matrix(random, kv, w), "attn_k_norm": norm(random, d)}
            if self.windows[layer]:
                made["attn_v"] = matrix(random, kv, w)
        return {f"blk.{layer}.{name}.weight": array for name, array in made.items()}

    def factors(self) -> Array:
        """Half of the pairs of a wide head do not turn, as far as floats go."""
        n = self.head_widths[1] // 2
        return np.array([1.0] * (n // 2) + [1e30] * (n - n // 2), np.float32)

    def metadata(self, kind: str, **counts: int) -> Metadata:
        made, (narrow, wide) = Metadata(), self.head_widths
        made.text("general.name", f"tiny {kind}")
        sizes = {
            "vocab_size": self.vocab_size,
            "context_length": self.context,
            "embedding_length": self.width,
            "block_count": len(self.windows),
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.key_length": wide,
            "attention.value_length": wide,
            "attention.key_length_swa": narrow,
            "attention.value_length_swa": narrow,
            "attention.sliding_window": self.window,
            "rope.dimension_count": wide,
            "rope.dimension_count_swa": narrow,
            **counts,
        }
        for name, count in sizes.items():
            made.count(f"{kind}.{name}", count)
        shared = [self.of_layer(self.kv_heads, layer) for layer in range(len(self.windows))]
        made.integers(f"{kind}.attention.head_count_kv", shared)
        made.flags(f"{kind}.attention.sliding_window_pattern", self.windows)
        made.number(f"{kind}.attention.layer_norm_rms_epsilon", _EPS)
        made.number(f"{kind}.rope.freq_base", _BASE)
        made.number(f"{kind}.rope.freq_base_swa", _BASE_SWA)
        synthetic_vocabulary(self.vocab_size).describe(made)
        return made

    def turned(self, heads: Array, layer: int, positions: Array) -> Array:
        d, swa = heads.shape[-1], self.windows[layer]
        speeds = (_BASE_SWA if swa else _BASE) ** (-np.arange(0, d, 2) / d)
        angles = positions[:, None] * (speeds if swa else speeds / self.factors())
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        one, other = heads[..., : d // 2], heads[..., d // 2 :]
        return np.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)

    def through(
        self, state: Array, layer: int, made: Tensors, positions: Array, cells: tuple[Array, Array]
    ) -> Array:
        """States [n, width] after a layer that attends to cells (keys, values: [m, heads, d])."""
        own = {
            name.removeprefix(f"blk.{layer}.").removesuffix(".weight"): array.astype(np.float64)
            for name, array in made.items()
            if name.startswith(f"blk.{layer}.")
        }
        n, d = len(state), self.of_layer(self.head_widths, layer)
        normed = rms(state) * own["attn_norm"]
        query = rms((normed @ own["attn_q"].T).reshape(n, self.heads, d)) * own["attn_q_norm"]
        query, (keys, values) = self.turned(query, layer, positions), cells
        behind = positions[:, None] - np.arange(len(keys))
        mixed, group = np.zeros((n, self.heads, d)), self.heads // keys.shape[1]
        for head in range(self.heads):
            scores = query[:, head] @ keys[:, head // group].T
            scores[behind < 0] = -np.inf
            if self.windows[layer]:
                scores[behind >= self.window] = -np.inf
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = shares / shares.sum(axis=1, keepdims=True) @ values[:, head // group]
        out = rms(mixed.reshape(n, -1) @ own["attn_output"].T) * own["post_attention_norm"]
        state = state + out
        normed = rms(state) * own["ffn_norm"]
        gate = gelu(normed @ own["ffn_gate"].T) * (normed @ own["ffn_up"].T)
        state = state + rms(gate @ own["ffn_down"].T) * own["post_ffw_norm"]
        return state * own["layer_output_scale"]


@dataclass(frozen=True)
class TinyGemma4(_Decoder):
    """The target. Its output matrix is made of the assistant's, so that both say alike."""

    def tensors(self) -> Tensors:
        random, w = np.random.default_rng([self.seed, 4]), self.width
        made = {
            "token_embd.weight": matrix(random, self.vocab_size, w),
            "output.weight": tokens_of(self.seed, self.vocab_size) @ bridge(self.seed, w),
            "output_norm.weight": norm(random, w),
            "rope_freqs.weight": self.factors(),
        }
        for layer in range(len(self.windows)):
            made |= self.layer(random, layer, keys=True)
        return made

    def write(self, path: Path) -> Path:
        metadata = self.metadata("gemma4", embedding_length_per_layer_input=0)
        metadata.number("gemma4.final_logit_softcapping", _CAP)
        return write(path, "gemma4", metadata, self.tensors())

    def run(self, tokens: Sequence[int]) -> tuple[Array, Array, dict[int, tuple[Array, Array]]]:
        """Last states and logits of a text's tokens, and the cells of each layer."""
        made, n = self.tensors(), len(tokens)
        positions = np.arange(n)
        state = made["token_embd.weight"][list(tokens)].astype(np.float64) * self.width**0.5
        cells = {}
        for layer in range(len(self.windows)):
            d = self.of_layer(self.head_widths, layer)
            normed = rms(state) * made[f"blk.{layer}.attn_norm.weight"]
            keys = (normed @ made[f"blk.{layer}.attn_k.weight"].T).reshape(n, -1, d)
            values = keys
            if (name := f"blk.{layer}.attn_v.weight") in made:
                values = (normed @ made[name].T).reshape(n, -1, d)
            keys = rms(keys) * made[f"blk.{layer}.attn_k_norm.weight"]
            cells[layer] = self.turned(keys, layer, positions), rms(values)
            state = self.through(state, layer, made, positions, cells[layer])
        state = rms(state) * made["output_norm.weight"]
        logits = state @ made["output.weight"].astype(np.float64).T
        return state, _CAP * np.tanh(logits / _CAP), cells


@dataclass(frozen=True)
class TinyAssistant(_Decoder):
    """The assistant of a target of this width."""

    width: int = 24
    windows: tuple[bool, ...] = (True, False)
    target_width: int = 32
    agreement: float = 0.9

    def tensors(self) -> Tensors:
        random, w, t = np.random.default_rng([self.seed, 5]), self.width, self.target_width
        same = np.concatenate([bridge(self.seed, t)[:w], np.zeros((w, t))], axis=1)
        mixed = self.agreement * same + (1.0 - self.agreement) * matrix(random, w, 2 * t)
        made = {
            "token_embd.weight": tokens_of(self.seed, self.vocab_size, w),
            "output_norm.weight": norm(random, w),
            "rope_freqs.weight": self.factors(),
            "nextn.pre_projection.weight": mixed.astype(np.float32),
            "nextn.post_projection.weight": matrix(random, t, w),
        }
        for layer in range(len(self.windows)):
            made |= self.layer(random, layer, keys=False)
        return made

    def write(self, path: Path, **counts: int) -> Path:
        more = {
            "embedding_length_out": self.target_width,
            "nextn_predict_layers": len(self.windows),
            **counts,
        }
        metadata = self.metadata("gemma4-assistant", **more)
        return write(path, "gemma4-assistant", metadata, self.tensors())

    def draft(
        self, target: TinyGemma4, text: Sequence[int], token: int, state: Array
    ) -> tuple[Array, Array]:
        """Logits after a token with a state, behind a text that is cached; and the next state."""
        made, cells = self.tensors(), target.run(text)[2]
        embedded = target.tensors()["token_embd.weight"][token] * self.target_width**0.5
        both = np.concatenate([embedded, state])[None].astype(np.float64)
        found = both @ made["nextn.pre_projection.weight"].T
        last = len(target.windows) - 1
        for layer, has_window in enumerate(self.windows):
            read = cells[last - 1 if has_window else last]
            found = self.through(found, layer, made, np.array([len(text)]), read)
        found = rms(found) * made["output_norm.weight"]
        logits = found @ made["token_embd.weight"].astype(np.float64).T
        return logits[0], (found @ made["nextn.post_projection.weight"].T)[0]


def variant(model: Any, **changes: Any) -> Any:
    """The same model with other sizes or another seed."""
    return replace(model, **changes)


def write(path: Path, kind: str, metadata: Metadata, made: Tensors) -> Path:
    planned = [
        PlannedTensor(name, array.shape, "F32", lambda array=array: array)  # type: ignore[misc]
        for name, array in made.items()
    ]
    write_gguf(path, kind, metadata, planned)
    return path


def tokens_of(seed: int, vocab_size: int, width: int = 24) -> Array:
    return matrix(np.random.default_rng([seed, 6]), vocab_size, width, 4.0)


def bridge(seed: int, width: int) -> Array:
    """Orthonormal rows [24, width]."""
    random = np.random.default_rng([seed, 7])
    return np.linalg.qr(random.standard_normal((width, width)))[0][:24].astype(np.float32)


def matrix(random: np.random.Generator, rows: int, columns: int, spread: float = 1.0) -> Array:
    return (random.standard_normal((rows, columns)) * spread * columns**-0.5).astype(np.float32)


def norm(random: np.random.Generator, width: int) -> Array:
    return (1.0 + 0.1 * random.standard_normal(width)).astype(np.float32)


def rms(values: Array) -> Array:
    return values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True) + _EPS)


def gelu(values: Array) -> Array:
    """GELU (tanh) as ggml has it on processors: a table in half precision."""
    given = values
    values = values.astype(np.float16).astype(np.float64)
    found = 0.5 * values * (1.0 + np.tanh((2.0 / np.pi) ** 0.5 * (values + 0.044715 * values**3)))
    found = found.astype(np.float16).astype(np.float64)
    return np.where(given <= -10.0, 0.0, np.where(given >= 10.0, given, found))
