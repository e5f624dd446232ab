"""Tiny models with NextN blocks (hy_v3, step35, glm4moe, qwen35), and a numpy reference.

The reference is of the first two, after llama.cpp at 4df29be4f. hy_v3 (src/models/hy-v3.cpp)
without experts is a Llama with normed queries and keys; its block follows vLLM's
HYV3MultiTokenPredictorLayer: h' = eh_proj [enorm(embed(x)); hnorm(h)], a decoder layer, a norm, the
output matrix; the normed state takes the place of h for the next token.

step35 (src/models/step35.cpp) hands on the state before the norm, in the trunk as in its blocks.
Every other layer sees a window only, and the others rotate half of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.convert.random_model import synthetic_vocabulary

Tensors = dict[str, np.ndarray]
_EPS = 1e-5
_BASE = 10000.0


@dataclass(frozen=True)
class TinyNextN:
    """A model of `layers` trunk layers and `blocks` NextN blocks: hy_v3, or with a `window` step35.

    `agreement` between 0 and 1 says how much the blocks are like the trunk: the smaller the
    `strength` of the layers, the more do both predict a token from the last one alone.
    """

    vocab_size: int = 320
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 48
    layers: int = 2
    blocks: int = 1
    context: int = 512
    seed: int = 0
    scale: float = 3.0
    agreement: float = 0.75
    strength: float = 0.5
    window: int = 0

    @property
    def architecture(self) -> str:
        return "step35" if self.window else "hy_v3"

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def tensors(self) -> Tensors:
        """The model's tensors by GGUF name, rows first."""
        random = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int, spread: float = 1.0) -> np.ndarray:
            return (random.standard_normal((rows, columns)) * spread * columns**-0.5).astype(
                np.float32
            )

        def norm(width: int) -> np.ndarray:
            return (1.0 + 0.1 * random.standard_normal(width)).astype(np.float32)

        w = self.width
        made = {
            "token_embd.weight": matrix(self.vocab_size, w, w**0.5),
            "output_norm.weight": norm(w),
            "output.weight": matrix(self.vocab_size, w, self.scale),
        }
        for layer in range(self.layers + self.blocks):
            block = f"blk.{layer}."
            kv = self.kv_heads * self.head_width
            made |= {
                block + "attn_norm.weight": norm(w),
                block + "attn_q.weight": matrix(w, w),
                block + "attn_k.weight": matrix(kv, w),
                block + "attn_v.weight": matrix(kv, w),
                block + "attn_output.weight": matrix(w, w, self.strength),
                block + "attn_q_norm.weight": norm(self.head_width),
                block + "attn_k_norm.weight": norm(self.head_width),
                block + "ffn_norm.weight": norm(w),
                block + "ffn_gate.weight": matrix(self.ffn, w),
                block + "ffn_up.weight": matrix(self.ffn, w),
                block + "ffn_down.weight": matrix(w, self.ffn, self.strength),
            }
            if layer >= self.layers:
                both = np.concatenate([np.eye(w), np.zeros((w, w))], axis=1)
                mixed = self.agreement * both + (1.0 - self.agreement) * matrix(w, 2 * w)
                made |= {
                    block + "nextn.eh_proj.weight": mixed.astype(np.float32),
                    block + "nextn.enorm.weight": norm(w),
                    block + "nextn.hnorm.weight": norm(w),
                    block + "nextn.shared_head_norm.weight": norm(w),
                }
        return made

    def write(self, path: Path, *, without: Sequence[str] = ()) -> Path:
        """Write the model; `without` leaves out the tensors whose names start so."""
        architecture = self.architecture
        metadata = _metadata(
            architecture,
            self.vocab_size,
            self.context,
            self.width,
            self.layers + self.blocks,
            self.ffn,
        )
        metadata.count(f"{architecture}.attention.head_count", self.heads)
        metadata.count(f"{architecture}.attention.head_count_kv", self.kv_heads)
        metadata.count(f"{architecture}.rope.dimension_count", self.head_width)
        metadata.count(f"{architecture}.expert_feed_forward_length", self.ffn)
        if self.window:
            metadata.count("step35.attention.sliding_window", self.window)
            windows = [self._has_window(layer) for layer in range(self.layers + self.blocks)]
            metadata.flags("step35.attention.sliding_window_pattern", windows)
            metadata.number("step35.rope.freq_base_swa", _BASE)
        if self.blocks:
            metadata.count(f"{architecture}.nextn_predict_layers", self.blocks)
        kept = {
            name: tensor
            for name, tensor in self.tensors().items()
            if not name.startswith(tuple(without) or ("?",))
        }
        _write(path, architecture, metadata, kept)
        return path

    def write_blocks_only(self, path: Path) -> Path:
        """Write the NextN blocks in a file of their own, as llama.cpp's converter does with
        --mtp."""
        return self.write(path, without=[f"blk.{layer}." for layer in range(self.layers)])

    # -- reference ---------------------------------------------------------------------------------

    def trunk(self, tokens: Sequence[int]) -> np.ndarray:
        """The states that NextN blocks read, float64 [n, width]."""
        made = self.tensors()
        state = made["token_embd.weight"][list(tokens)].astype(np.float64)
        for layer in range(self.layers):
            state = self._layer(made, layer, state)
        return state if self.window else _rms(state, made["output_norm.weight"])

    def block(
        self, which: int, tokens: Sequence[int], states: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The logits and the states that a NextN block makes of pairs: token i with the state in
        row i."""
        made = self.tensors()
        prefix = f"blk.{self.layers + which}.nextn."
        embedded = _rms(
            made["token_embd.weight"][list(tokens)].astype(np.float64),
            made[prefix + "enorm.weight"],
        )
        before = _rms(states.astype(np.float64), made[prefix + "hnorm.weight"])
        mixed = np.concatenate([embedded, before], axis=1) @ made[
            prefix + "eh_proj.weight"
        ].T.astype(np.float64)
        state = self._layer(made, self.layers + which, mixed)
        normed = _rms(state, made[prefix + "shared_head_norm.weight"])
        return normed @ made["output.weight"].T.astype(np.float64), state if self.window else normed

    def _has_window(self, layer: int) -> bool:
        return self.window > 0 and layer % 2 == 0

    def _layer(self, made: Tensors, layer: int, state: np.ndarray) -> np.ndarray:
        def linear(name: str, values: np.ndarray) -> np.ndarray:
            return values @ made[f"blk.{layer}.{name}.weight"].T.astype(np.float64)

        n, d = len(state), self.head_width
        normed = _rms(state, made[f"blk.{layer}.attn_norm.weight"])
        query, key = (
            _rotated(
                _rms(
                    linear(f"attn_{name}", normed).reshape(n, -1, d),
                    made[f"blk.{layer}.attn_{name}_norm.weight"],
                ),
                d // 2 if self.window and not self._has_window(layer) else d,
            )
            for name in ("q", "k")
        )
        value = linear("attn_v", normed).reshape(n, -1, d)
        group = self.heads // self.kv_heads
        mixed = np.zeros((n, self.heads, d))
        for head in range(self.heads):
            scores = query[:, head] @ key[:, head // group].T / d**0.5
            scores[np.triu_indices(n, 1)] = -np.inf
            if self._has_window(layer):
                scores[np.tril_indices(n, -self.window)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ value[:, head // group]
        state = state + linear("attn_output", mixed.reshape(n, -1))
        normed = _rms(state, made[f"blk.{layer}.ffn_norm.weight"])
        gate = linear("ffn_gate", normed)
        return state + linear("ffn_down", gate / (1.0 + np.exp(-gate)) * linear("ffn_up", normed))


def write_tiny_glm4moe(path: Path, *, seed: int = 0, preference: float = 1.0) -> Path:
    """Write a random glm4moe (GLM-4.5): a dense layer, two with experts, a NextN block like
    these. A large `preference` lets all tokens choose the same experts."""
    random = np.random.default_rng(seed)
    vocab_size, width, ffn, layers, heads, kv_heads, head, experts = 320, 64, 48, 3, 4, 2, 16, 3

    def matrix(*shape: int, spread: float = 1.0) -> np.ndarray:
        return (random.standard_normal(shape) * spread * shape[-1] ** -0.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1.0 + 0.1 * random.standard_normal(size)).astype(np.float32)

    made = {
        "token_embd.weight": matrix(vocab_size, width, spread=width**0.5),
        "output_norm.weight": norm(width),
        "output.weight": matrix(vocab_size, width, spread=3.0),
    }
    for layer in range(layers + 1):
        block = f"blk.{layer}."
        made |= {
            block + "attn_norm.weight": norm(width),
            block + "attn_q.weight": matrix(heads * head, width),
            block + "attn_k.weight": matrix(kv_heads * head, width),
            block + "attn_v.weight": matrix(kv_heads * head, width),
            block + "attn_output.weight": matrix(width, heads * head),
            block + "post_attention_norm.weight": norm(width),
        }
        if layer == 0:
            made |= {block + f"ffn_{name}.weight": matrix(ffn, width) for name in ("gate", "up")}
            made[block + "ffn_down.weight"] = matrix(width, ffn)
            continue
        made |= {
            block + "ffn_gate_inp.weight": matrix(experts, width),
            block + "exp_probs_b.bias": preference
            * random.standard_normal(experts).astype(np.float32),
        }
        for name, shape in {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}.items():
            made[block + f"ffn_{name}_exps.weight"] = matrix(experts, *shape)
            made[block + f"ffn_{name}_shexp.weight"] = matrix(*shape)
    both = np.concatenate([np.eye(width), np.zeros((width, width))], axis=1)
    made |= {
        f"blk.{layers}.nextn.eh_proj.weight": (both + 0.2 * matrix(width, 2 * width)).astype(
            np.float32
        ),
        f"blk.{layers}.nextn.enorm.weight": norm(width),
        f"blk.{layers}.nextn.hnorm.weight": norm(width),
    }
    metadata = _metadata("glm4moe", vocab_size, 512, width, layers + 1, ffn)
    counts = {
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "rope.dimension_count": head // 2,
        "expert_count": experts,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": ffn,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": 1,
    }
    for name, count in counts.items():
        metadata.count(f"glm4moe.{name}", count)
    metadata.number("glm4moe.expert_weights_scale", 1.5)
    metadata.flag("glm4moe.expert_weights_norm", True)
    _write(path, "glm4moe", metadata, made)
    return path


def write_tiny_qwen35(
    path: Path,
    *,
    blocks: int = 1,
    seed: int = 0,
    vocab_size: int = 320,
    scale: float = 3.0,
    experts: int = 0,
    context: int = 512,
    chat_template: str | None = None,
) -> Path:
    """Write a random qwen35: three layers with a recurrent state, one of attention, and NextN
    blocks; with `experts`, two of which are used for a token, a qwen35moe."""
    random = np.random.default_rng(seed)
    width, ffn, layers = 64, 48, 4
    heads, kv_heads, head = 2, 1, 32
    state, value_heads, key_heads, kernel = 16, 4, 2, 4
    values, keys = state * value_heads, state * key_heads

    def matrix(rows: int, columns: int, spread: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * spread * columns**-0.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1.0 + 0.1 * random.standard_normal(size)).astype(np.float32)

    made = {
        "token_embd.weight": matrix(vocab_size, width, width**0.5),
        "output_norm.weight": norm(width),
        "output.weight": matrix(vocab_size, width, scale),
    }
    for layer in range(layers + blocks):
        block = f"blk.{layer}."
        made |= {
            block + "attn_norm.weight": norm(width),
            block + "post_attention_norm.weight": norm(width),
        }
        if experts:
            made |= {
                block + "ffn_gate_inp.weight": matrix(experts, width),
                block + "ffn_gate_inp_shexp.weight": matrix(1, width)[0],
            }
            sizes = {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
            for name, (rows, columns) in sizes.items():
                each = np.stack([matrix(rows, columns) for _ in range(experts)])
                made[block + f"ffn_{name}_exps.weight"] = each
                made[block + f"ffn_{name}_shexp.weight"] = matrix(rows, columns)
        else:
            made |= {block + f"ffn_{name}.weight": matrix(ffn, width) for name in ("gate", "up")}
            made[block + "ffn_down.weight"] = matrix(width, ffn)
        if layer >= layers or layer % 4 == 3:
            made |= {
                block + "attn_q.weight": matrix(2 * heads * head, width),
                block + "attn_k.weight": matrix(kv_heads * head, width),
                block + "attn_v.weight": matrix(kv_heads * head, width),
                block + "attn_output.weight": matrix(width, heads * head),
                block + "attn_q_norm.weight": norm(head),
                block + "attn_k_norm.weight": norm(head),
            }
        else:
            made |= {
                block + "attn_qkv.weight": matrix(2 * keys + values, width),
                block + "attn_gate.weight": matrix(values, width),
                block + "ssm_conv1d.weight": matrix(2 * keys + values, kernel),
                block + "ssm_dt.bias": random.standard_normal(value_heads).astype(np.float32),
                block + "ssm_a": -np.exp(random.standard_normal(value_heads)).astype(np.float32),
                block + "ssm_beta.weight": matrix(value_heads, width),
                block + "ssm_alpha.weight": matrix(value_heads, width),
                block + "ssm_norm.weight": norm(state),
                block + "ssm_out.weight": matrix(width, values),
            }
        if layer >= layers:
            both = np.concatenate([np.eye(width), np.zeros((width, width))], axis=1)
            made |= {
                block + "nextn.eh_proj.weight": (both + 0.2 * matrix(width, 2 * width)).astype(
                    np.float32
                ),
                block + "nextn.enorm.weight": norm(width),
                block + "nextn.hnorm.weight": norm(width),
                block + "nextn.shared_head_norm.weight": norm(width),
            }
    kind = "qwen35moe" if experts else "qwen35"
    metadata = _metadata(kind, vocab_size, context, width, layers + blocks, ffn)
    if chat_template is not None:
        metadata.text("tokenizer.chat_template", chat_template)
    metadata.count(f"{kind}.attention.head_count", heads)
    metadata.count(f"{kind}.attention.head_count_kv", kv_heads)
    metadata.count(f"{kind}.attention.key_length", head)
    metadata.count(f"{kind}.attention.value_length", head)
    metadata.count(f"{kind}.rope.dimension_count", head // 2)
    metadata.integers(f"{kind}.rope.dimension_sections", [3, 3, 2, 0])
    metadata.count(f"{kind}.ssm.conv_kernel", kernel)
    metadata.count(f"{kind}.ssm.inner_size", values)
    metadata.count(f"{kind}.ssm.state_size", state)
    metadata.count(f"{kind}.ssm.time_step_rank", value_heads)
    metadata.count(f"{kind}.ssm.group_count", key_heads)
    if experts:
        metadata.count(f"{kind}.expert_count", experts)
        metadata.count(f"{kind}.expert_used_count", 2)
        metadata.count(f"{kind}.expert_feed_forward_length", ffn)
        metadata.count(f"{kind}.expert_shared_feed_forward_length", ffn)
    if blocks:
        metadata.count(f"{kind}.nextn_predict_layers", blocks)
    _write(path, kind, metadata, made)
    return path


def _metadata(
    architecture: str, vocab_size: int, context: int, width: int, layers: int, ffn: int
) -> Metadata:
    metadata = Metadata()
    metadata.text("general.name", f"tiny {architecture}")
    metadata.count(f"{architecture}.vocab_size", vocab_size)
    metadata.count(f"{architecture}.context_length", context)
    metadata.count(f"{architecture}.embedding_length", width)
    metadata.count(f"{architecture}.block_count", layers)
    metadata.count(f"{architecture}.feed_forward_length", ffn)
    metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon", _EPS)
    metadata.number(f"{architecture}.rope.freq_base", _BASE)
    synthetic_vocabulary(vocab_size).describe(metadata)
    return metadata


def _write(path: Path, architecture: str, metadata: Metadata, tensors: Tensors) -> None:
    planned = [
        PlannedTensor(name, tensor.shape, "F32", lambda array=tensor: array)
        for name, tensor in tensors.items()
    ]
    write_gguf(path, architecture, metadata, planned)


def _rms(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + _EPS) * weight


def _rotated(heads: np.ndarray, d: int) -> np.ndarray:
    """Rotary positions 0, 1, ... of the first d of [n, heads, head width], halves against each
    other (NeoX)."""
    n = len(heads)
    angles = np.arange(n)[:, np.newaxis] * _BASE ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angles)[:, np.newaxis], np.sin(angles)[:, np.newaxis]
    first, second, rest = heads[..., : d // 2], heads[..., d // 2 : d], heads[..., d:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)


def variant(model: TinyNextN, **changes: object) -> TinyNextN:
    """The same model with other sizes or another seed."""
    return dataclasses.replace(model, **changes)
