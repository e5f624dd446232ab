"""Tiny Hydra heads: checkpoints with upstream's names, a torch reference, GGUF files.

The reference follows the paper (Ankner et al. 2024, sections 3 and 4.3) and zankner/Hydra, commit
7f39cbdae4be9da38c677317891f2b96d539f2c6, hydra/model/hydra_heads/prefix_mlp_head.py (`ResBlock`,
`HydraPrefixMLP`): the residual connection of a block that makes its input narrower is a linear
layer with a bias, cat(state, embeddings of the path) in that order, a LlamaModel of one layer over
the states for Hydra++. The heads without that layer are its mlp_head.py, read in
hemingkx/Spec-Bench, commit 02afedb1f5872edd14f16aa7a292d726cb96c146, model/hydra/hydra_heads/.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

PREFIX = "prefix_embeding_layer."
LAYER = f"{PREFIX}layers.0."
_OURS = {
    f"{LAYER}input_layernorm": "attn_norm",
    f"{LAYER}self_attn.q_proj": "attn_q",
    f"{LAYER}self_attn.k_proj": "attn_k",
    f"{LAYER}self_attn.v_proj": "attn_v",
    f"{LAYER}self_attn.o_proj": "attn_output",
    f"{LAYER}post_attention_layernorm": "ffn_norm",
    f"{LAYER}mlp.gate_proj": "ffn_gate",
    f"{LAYER}mlp.up_proj": "ffn_up",
    f"{LAYER}mlp.down_proj": "ffn_down",
    f"{PREFIX}norm": "output_norm",
}


@dataclass(frozen=True)
class TinyHydra:
    """Weights by upstream's names; `dropout` says whether dropout takes every other place, as in
    Hydra++."""

    weights: dict[str, torch.Tensor]
    heads: int
    blocks: int
    grounded: bool = True
    dropout: bool = False
    n_heads: int = 4
    n_kv_heads: int = 2
    rope_base: float = 10000.0
    rope_factor: float = 1.0
    rope_divisors: tuple[float, ...] = ()
    eps: float = 1e-5

    @property
    def hidden(self) -> int:
        return self.weights[f"{self.block(0, 0)}.linear.weight"].shape[0]

    @property
    def prefixed(self) -> bool:
        return f"{PREFIX}norm.weight" in self.weights

    def block(self, head: int, block: int) -> str:
        return f"hydra_mlp.{head}.{2 * block + 1 if self.dropout else block}"

    def output(self, head: int) -> str:
        return f"hydra_lm_head.{head}.1" if self.dropout else f"hydra_lm_head.{head}"

    # -- the reference -----------------------------------------------------------------------------

    def double(self) -> TinyHydra:
        weights = {name: weight.double() for name, weight in self.weights.items()}
        return TinyHydra(**{**self.__dict__, "weights": weights})

    def logits(self, head: int, states: Any, embedded: Any, target_output: Any) -> torch.Tensor:
        """Head's logits [n, vocab] for states [n, h] and embeddings [n, head + 1, h] of the tokens
        after them."""
        w = self.weights
        x = torch.cat([states, embedded.flatten(1)], 1) if self.grounded else states
        for block in range(self.blocks):
            name = self.block(head, block)
            around = (
                self._linear(f"{name}.res_connection", x) if self.grounded and block == 0 else x
            )
            x = around + functional.silu(self._linear(f"{name}.linear", x))
        name = self.output(head)
        return functional.linear(x, w.get(f"{name}.weight", target_output), w.get(f"{name}.bias"))

    def prefix_states(self, states: Any, first: int = 0) -> torch.Tensor:
        """The prefix layer's outputs [n, h] for the states [n, h] of positions `first` on."""
        x = states + self._attention(self._norm(states, f"{LAYER}input_layernorm"), first)
        normed = self._norm(x, f"{LAYER}post_attention_layernorm")
        gate, up = (
            functional.linear(normed, self.weights[f"{LAYER}mlp.{part}_proj.weight"])
            for part in ("gate", "up")
        )
        x = x + functional.linear(
            functional.silu(gate) * up, self.weights[f"{LAYER}mlp.down_proj.weight"]
        )
        return self._norm(x, f"{PREFIX}norm")

    def read_states(self, states: Any) -> torch.Tensor:
        """What the heads read in the place of the target's hidden states."""
        return self.prefix_states(states) if self.prefixed else states

    def _linear(self, name: str, x: Any) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Any, name: str) -> torch.Tensor:
        return (
            x / (x.pow(2).mean(1, keepdim=True) + self.eps).sqrt() * self.weights[f"{name}.weight"]
        )

    def _attention(self, x: Any, first: int) -> torch.Tensor:
        n, d = len(x), self.hidden // self.n_heads
        q, k, v = (
            functional.linear(x, self.weights[f"{LAYER}self_attn.{letter}_proj.weight"])
            .view(n, -1, d)
            .transpose(0, 1)
            for letter in "qkv"
        )
        q, k = self._rotated(q, first), self._rotated(k, first)
        k, v = (shared.repeat_interleave(self.n_heads // self.n_kv_heads, 0) for shared in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(d)
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        mixed = (scores.softmax(2) @ v).transpose(0, 1).reshape(n, -1)
        return functional.linear(mixed, self.weights[f"{LAYER}self_attn.o_proj.weight"])

    def _rotated(self, heads: Any, first: int) -> torch.Tensor:
        half = heads.shape[-1] // 2
        speeds = self.rope_base ** (-torch.arange(half, dtype=heads.dtype) / half)
        if self.rope_divisors:
            speeds = speeds / torch.tensor(self.rope_divisors, dtype=heads.dtype)
        positions = (
            torch.arange(first, first + heads.shape[1], dtype=heads.dtype) / self.rope_factor
        )
        angles = positions[:, None] * speeds
        a, b = heads[..., :half], heads[..., half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
        )

    # -- files -------------------------------------------------------------------------------------

    def gguf_tensors(self) -> dict[str, np.ndarray]:
        """The weights under the names of the GGUF file."""
        found: dict[str, np.ndarray] = {}
        for head in range(self.heads):
            names = {f"res.{j}": f"{self.block(head, j)}.linear" for j in range(self.blocks)}
            names |= {"skip": f"{self.block(head, 0)}.res_connection", "output": self.output(head)}
            for ours, theirs in names.items():
                for part in ("weight", "bias"):
                    if f"{theirs}.{part}" in self.weights:
                        found[f"hydra.{head}.{ours}.{part}"] = self.weights[
                            f"{theirs}.{part}"
                        ].numpy()
        for theirs, ours in _OURS.items():
            if self.prefixed:
                found[f"hydra.prefix.{ours}.weight"] = self.weights[f"{theirs}.weight"].numpy()
        if self.rope_divisors:
            found["hydra.prefix.rope_freqs.weight"] = np.array(self.rope_divisors, np.float32)
        return found

    def write(self, path: Path, n_vocab: int, **changes: Any) -> Path:
        gguf = __import__("gguf")
        writer = gguf.GGUFWriter(path, changes.get("architecture", "hydra"))
        sizes: dict[str, int | None] = {
            "embedding_length": self.hidden,
            "vocab_size": n_vocab,
            "head_count": self.heads,
            "block_count": self.blocks,
        }
        if self.prefixed:
            wide = self.weights[f"{LAYER}mlp.gate_proj.weight"].shape[0]
            sizes |= {"feed_forward_length": wide, "attention.head_count": self.n_heads}
            sizes |= {"attention.head_count_kv": self.n_kv_heads}
            writer.add_float32("hydra.rope.freq_base", self.rope_base)
            writer.add_float32("hydra.rope.scaling.factor", self.rope_factor)
            writer.add_float32("hydra.attention.layer_norm_rms_epsilon", self.eps)
        for name, value in {**sizes, **{k: v for k, v in changes.items() if k in sizes}}.items():
            if value is not None:
                writer.add_uint32(f"hydra.{name}", value)
        for name, flag in {"grounded": self.grounded, "prefix_layer": self.prefixed}.items():
            writer.add_bool(f"hydra.{name}", changes.get(name, flag))
        if "accuracy" in changes:
            writer.add_array("hydra.node_accuracy", changes["accuracy"])
        if "vocabulary" in changes:
            writer.add_string("specrun.target.vocabulary_sha256", changes["vocabulary"])
        kind = gguf.GGMLQuantizationType[changes.get("quantization", "F32")]
        for name, array in {**self.gguf_tensors(), **changes.get("replaced", {})}.items():
            if name == changes.get("without"):
                continue
            if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def random_hydra(
    hidden: int,
    n_vocab: int,
    *,
    heads: int = 3,
    blocks: int = 1,
    grounded: bool = True,
    prefix: bool = False,
    own_output: bool = True,
    seed: int = 0,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    wide: int = 64,
    **rope: Any,
) -> TinyHydra:
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source) / math.sqrt(shape[-1])

    made = TinyHydra({}, heads, blocks, grounded, prefix, n_heads, n_kv_heads, **rope)
    w = made.weights

    def linear(name: str, rows: int, columns: int) -> None:
        w[f"{name}.weight"], w[f"{name}.bias"] = normal(rows, columns), normal(rows)

    for head in range(heads):
        first = hidden * (head + 2) if grounded else hidden
        for block in range(blocks):
            linear(f"{made.block(head, block)}.linear", hidden, hidden if block else first)
        if grounded:
            linear(f"{made.block(head, 0)}.res_connection", hidden, first)
        if own_output:
            linear(made.output(head), n_vocab, hidden)
    if prefix:
        kv = hidden // n_heads * n_kv_heads
        shapes = {
            "q": (hidden, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, hidden),
        }
        for name, shape in shapes.items():
            w[f"{LAYER}self_attn.{name}_proj.weight"] = normal(*shape)
        for name, shape in {
            "gate": (wide, hidden),
            "up": (wide, hidden),
            "down": (hidden, wide),
        }.items():
            w[f"{LAYER}mlp.{name}_proj.weight"] = normal(*shape)
        for name in (
            f"{LAYER}input_layernorm",
            f"{LAYER}post_attention_layernorm",
            f"{PREFIX}norm",
        ):
            w[f"{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=source)
    return made


def log_probs(
    reference: TinyHydra,
    state: np.ndarray,
    paths: Sequence[Sequence[int]],
    embedding: np.ndarray,
    output: np.ndarray,
) -> np.ndarray:
    """The reference's log-probabilities [n, vocab] after each path below a state [h], in
    float64."""
    embedded = torch.tensor(embedding, dtype=torch.float64)[torch.tensor(paths)]
    states = torch.tensor(state, dtype=torch.float64).expand(len(paths), -1)
    logits = reference.double().logits(
        len(paths[0]) - 1, states, embedded, torch.tensor(output, dtype=torch.float64)
    )
    return logits.log_softmax(1).numpy()


def train(
    hydra: TinyHydra,
    texts: Iterable[Sequence[int]],
    states: Iterable[np.ndarray],
    embedding: np.ndarray,
    output: np.ndarray,
    *,
    steps: int = 60,
    rate: float = 0.02,
) -> TinyHydra:
    """The heads after some steps of cross-entropy on texts with the target's states of all
    positions."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights = {name: torch.nn.Parameter(weight.clone()) for name, weight in hydra.weights.items()}
    learner = TinyHydra(**{**hydra.__dict__, "weights": weights})
    table, output_matrix = torch.tensor(embedding), torch.tensor(output)
    pairs = [
        (torch.tensor(list(text)), torch.tensor(state))
        for text, state in zip(texts, states, strict=True)
    ]
    optimiser = torch.optim.Adam(weights.values(), rate)
    for _ in range(steps):
        predicted, wanted = [], []
        for text, pair in pairs:
            read = learner.read_states(pair)
            for head in range(hydra.heads):
                n = len(text) - head - 2
                paths = text[1:].unfold(0, head + 1, 1)[:n]
                predicted.append(learner.logits(head, read[:n], table[paths], output_matrix))
                wanted.append(text[head + 2 :])
        loss = functional.cross_entropy(torch.cat(predicted), torch.cat(wanted))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    trained = {name: weight.detach() for name, weight in weights.items()}
    return TinyHydra(**{**hydra.__dict__, "weights": trained})
