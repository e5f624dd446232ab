"""A tiny EAGLE-3 head: checkpoints in every published layout, torch reference, GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Tensors = Mapping[str, torch.Tensor]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class TinyEagle3:
    """`weights` [out, in] under SafeAILab's names; `d2t` offsets among them where there is a draft
    vocabulary.

    Reference: SafeAILab/EAGLE at 148042c5, eagle/model/cnets.py: `Model.forward` (fc where the
    width of the states is not the embedding's), `LlamaDecoderLayeremb.forward` (hidden_norm,
    input_layernorm, cat(embedding, state), residual is the state that is not normed),
    `topK_genrate` (lm_head(norm(z)), z is fed back, first position 0). What speculators add:
    vllm-project/speculators, models/eagle3/model_definitions.py at 08af5f4d (norm_before_residual),
    core.py at 033c87f2 (input_norm, several layers; P-EAGLE's `mask_hidden` and token `mask`).
    YaRN: transformers, modeling_rope_utils.py. EAGLE-3.1's fc_norm and norm_output: NVIDIA NeMo
    Automodel, draft_llama.py.
    """

    weights: dict[str, npt.NDArray[Any]]
    n_heads: int = 4
    n_kv_heads: int = 2
    rope_base: float = 10000.0
    eps: float = 1e-5
    norm_before_residual: bool = False
    norm_output: bool = False
    rope_scaling: dict[str, Any] | None = None
    taps: tuple[int, ...] = (1, 3, 5)
    mask: int | None = None

    @property
    def n_layers(self) -> int:
        found = {name.split(".")[1] for name in self.weights if name.startswith("layers.")}
        return 1 + len(found)

    @property
    def hidden(self) -> int:
        return int(self.weights["fc.weight"].shape[0])

    @property
    def head_size(self) -> int:
        return int(self.weights["midlayer.self_attn.q_proj.weight"].shape[0]) // self.n_heads

    @property
    def target_hidden(self) -> int:
        return int(self.weights["fc.weight"].shape[1]) // len(self.taps)

    @property
    def target_ids(self) -> npt.NDArray[np.int64] | None:
        offsets = self.weights.get("d2t")
        return None if offsets is None else offsets + np.arange(len(offsets))

    def tensors(self, kind: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """The weights that compute something."""
        wanted = {
            name: weight for name, weight in self.weights.items() if name not in ("d2t", "t2d")
        }
        return {
            name: torch.tensor(np.asarray(array, np.float64), dtype=kind)
            for name, array in wanted.items()
        }

    def frequencies(self) -> torch.Tensor:
        """Radians by which a pair of numbers turns from one position to the next."""
        half = self.head_size // 2
        return self.rope_base ** (-torch.arange(half, dtype=torch.float64) / half) / torch.tensor(
            self.factors()
        )

    def factors(self) -> npt.NDArray[np.float64]:
        """What divides the frequencies; for llama3, Meta's `apply_scaling` (llama-models,
        llama3/model.py)."""
        half = self.head_size // 2
        if self.rope_scaling is None:
            return np.ones(half)
        scaling = self.rope_scaling
        if scaling["rope_type"] == "linear":
            return np.full(half, scaling["factor"])
        if scaling["rope_type"] == "yarn":
            return self._yarn(half, scaling["factor"], scaling["original_max_position_embeddings"])
        waves = 2 * np.pi * self.rope_base ** (np.arange(half) / half)
        trained = scaling["original_max_position_embeddings"]
        low, high = trained / scaling["low_freq_factor"], trained / scaling["high_freq_factor"]
        smooth = (trained / waves - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        return np.where(waves < high, 1.0, np.where(waves > low, scaling["factor"], between))

    def _yarn(self, half: int, factor: float, trained: int) -> npt.NDArray[np.float64]:
        turns = np.array([32.0, 1.0])
        bounds = half * np.log(trained / (turns * 2 * np.pi)) / np.log(self.rope_base)
        low, high = max(np.floor(bounds[0]), 0.0), min(np.ceil(bounds[1]), 2 * half - 1)
        kept = 1.0 - np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return 1.0 / ((1.0 - kept) / factor + kept)

    @property
    def magnitude(self) -> float:
        """What YaRN multiplies turned heads by."""
        scaling = self.rope_scaling or {}
        usual = scaling.get("rope_type") == "yarn"
        return 1.0 + 0.1 * float(np.log(scaling["factor"])) if usual else 1.0

    # -- the reference -----------------------------------------------------------------------------

    def fused(self, w: Tensors, features: torch.Tensor) -> torch.Tensor:
        """States [n, hidden] of the taps [n, taps * target's hidden]."""
        if "input_norm.weight" in w:
            features = self._norm(features, w["input_norm.weight"])
        if "fc_norm.0.weight" in w:
            parts = features.chunk(len(self.taps), -1)
            features = torch.cat(
                [self._norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1
            )
        return features @ w["fc.weight"].T

    def predicted(
        self,
        w: Tensors,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: Sequence[int],
        sees: npt.NDArray[np.bool_],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is fed back and what lm_head reads, [n, hidden] each; pair i attends to the pairs j
        with sees[i, j]."""
        layer = {name.removeprefix("midlayer."): weight for name, weight in w.items()}
        normed = self._norm(states, layer["hidden_norm.weight"])
        x = torch.cat([self._norm(tokens, layer["input_layernorm.weight"]), normed], -1)
        residual = normed if self.norm_before_residual else states
        z = self._layer(layer, x, residual, positions, sees)
        for number in range(1, self.n_layers):
            start = f"layers.{number}."
            layer = {name.removeprefix(start): weight for name, weight in w.items()}
            x = self._norm(z, layer["input_layernorm.weight"])
            z = self._layer(layer, x, z, positions, sees)
        read = self._norm(z, w["norm.weight"])
        return (read if self.norm_output else z), read

    def _layer(
        self,
        layer: Tensors,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: Sequence[int],
        sees: npt.NDArray[np.bool_],
    ) -> torch.Tensor:
        mixed = self._attention(layer, x, positions, torch.tensor(sees))
        y = residual + linear(layer, "self_attn.o_proj", mixed)
        m = self._norm(y, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(linear(layer, "mlp.gate_proj", m))
        return y + linear(layer, "mlp.down_proj", gate * linear(layer, "mlp.up_proj", m))

    def _attention(
        self, layer: Tensors, x: torch.Tensor, positions: Sequence[int], sees: torch.Tensor
    ) -> torch.Tensor:
        n, d = len(x), self.head_size
        angles = (
            torch.tensor(list(positions), dtype=torch.float64)[:, None, None] * self.frequencies()
        )
        cos, sin = (part.to(x.dtype) * self.magnitude for part in (angles.cos(), angles.sin()))

        def heads(part: str, count: int) -> torch.Tensor:
            return linear(layer, f"self_attn.{part}_proj", x).reshape(n, count, d)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        group = self.n_heads // self.n_kv_heads

        def normed(part: str, count: int) -> torch.Tensor:
            weight = layer.get(f"self_attn.{part}_norm.weight")
            found = heads(part, count)
            return found if weight is None else self._norm(found, weight)

        q = rotated(normed("q", self.n_heads))
        k = rotated(normed("k", self.n_kv_heads)).repeat_interleave(group, 1)
        v = heads("v", self.n_kv_heads).repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / d**0.5
        shares = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        return torch.einsum("hij,jhd->ihd", shares, v).reshape(n, -1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight

    # -- files -------------------------------------------------------------------------------------

    def write(self, path: Path, target: Path, **changes: Any) -> Path:
        """The file as llama.cpp's converter writes it: conversion/llama.py, `permute` and
        `modify_tensors`."""
        gguf = __import__("gguf")
        kind = gguf.GGMLQuantizationType[changes.pop("quantization", "F32")]
        writer = gguf.GGUFWriter(path, changes.pop("architecture", "eagle3"))
        source = gguf.GGUFReader(target)
        vocab_size = len(source.fields["tokenizer.ggml.tokens"].data)
        sizes = {
            "context_length": 1024,
            "embedding_length": self.hidden,
            "block_count": self.n_layers,
            "feed_forward_length": self.weights["midlayer.mlp.gate_proj.weight"].shape[0],
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "rope.dimension_count": self.head_size,
            "vocab_size": vocab_size,
            "target_hidden_size": self.target_hidden,
        }
        for name, value in {**sizes, **{k: v for k, v in changes.items() if k in sizes}}.items():
            writer.add_uint32(f"eagle3.{name}", value)
        writer.add_float32("eagle3.rope.freq_base", self.rope_base)
        writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", self.eps)
        taps = [int(tap) for tap in changes.get("taps", self.taps)]
        if taps:
            writer.add_array("eagle3.target_layers", taps)
        scaling = changes.get("scaling", (self.rope_scaling or {}).get("rope_type"))
        if scaling not in (None, "llama3"):
            writer.add_string("eagle3.rope.scaling.type", scaling)
            settings = self.rope_scaling or {"factor": 1.0}
            writer.add_float32("eagle3.rope.scaling.factor", settings["factor"])
            trained = settings.get("original_max_position_embeddings")
            if trained:
                writer.add_uint32("eagle3.rope.scaling.original_context_length", trained)
        if self.mask is not None:
            writer.add_uint32("tokenizer.ggml.mask_token_id", self.mask)
        for name, flag in self._flags().items():
            writer.add_bool(f"eagle3.{name}", flag)
        for name, known in source.fields.items():
            if name.startswith("tokenizer."):
                element = known.types[-1] if len(known.types) > 1 else None
                writer.add_key_value(name, known.contents(), known.types[0], element)
        for name, array in self.gguf_tensors().items():
            if name == changes.get("without"):
                continue
            if name == "d2t":
                writer.add_tensor(name, changes.get("d2t", array.astype(np.int64)))
            elif array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _flags(self) -> dict[str, bool]:
        flags = {
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": "input_norm.weight" in self.weights,
        }
        if "fc_norm.0.weight" in self.weights:
            flags["fc_norm"] = True
        if self.norm_output:
            flags["norm_output"] = True
        return flags

    def gguf_tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The tensors under llama.cpp's names."""
        found: dict[str, npt.NDArray[Any]] = {}
        if self.rope_scaling and self.rope_scaling["rope_type"] == "llama3":
            found["rope_freqs.weight"] = self.factors().astype(np.float32)
        for name, array in self.weights.items():
            if name == "t2d":
                continue
            if name == "d2t":
                array = self.target_ids
            if name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
                array = array.reshape(2, -1).T.reshape(-1)
            for part, heads in (("q", self.n_heads), ("k", self.n_kv_heads)):
                if f"self_attn.{part}_proj." in name:
                    halves = array.reshape(heads, 2, self.head_size // 2, -1)
                    array = halves.swapaxes(1, 2).reshape(array.shape)
            found[_gguf_name(name)] = array.reshape(-1) if name == "mask_hidden" else array
        return found

    def save(
        self,
        folder: Path,
        target_config: Mapping[str, Any],
        layout: str = "safeailab",
        **changes: Any,
    ) -> Path:
        """A checkpoint folder: SafeAILab's layout, SpecForge's with `eagle_config`, DeepSpec's, or
        that of speculators."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        draft_tokens = (
            len(self.weights["lm_head.weight"]) if "lm_head.weight" in self.weights else None
        )
        width = self.target_hidden
        inner = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.weights["midlayer.mlp.gate_proj.weight"].shape[0],
            "vocab_size": target_config["vocab_size"],
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_base,
            "max_position_embeddings": 1024,
            "hidden_act": "silu",
            "rope_scaling": self.rope_scaling,
            "attention_bias": "midlayer.self_attn.q_proj.bias" in self.weights,
            "mlp_bias": "midlayer.mlp.up_proj.bias" in self.weights,
        }
        outer: dict[str, Any] = {"draft_vocab_size": draft_tokens or target_config["vocab_size"]}
        if width != self.hidden:
            outer["target_hidden_size"] = width
        outer |= self._flags()
        names = {name: name for name in self.weights}
        if layout == "speculators":
            names = {name: name.replace("midlayer.", "layers.0.") for name in names}
            kind = "Eagle3Speculator" if self.mask is None else "PEagleSpeculator"
            outer |= {"speculators_model_type": "eagle3", "architectures": [kind]}
            if self.mask is not None:
                proposal = {"speculative_tokens": 6, "proposal_type": "greedy"}
                outer |= {"speculators_model_type": "peagle", "mask_token_id": self.mask}
                outer["speculators_config"] = {"proposal_methods": [proposal]}
            outer["eagle_aux_hidden_state_layer_ids"] = list(self.taps)
            config = {**outer, "transformer_layer_config": {**inner, "model_type": "llama"}}
        elif layout == "deepspec":
            names = {name: name.replace("midlayer.", "layers.0.") for name in names}
            own = {"architectures": ["Qwen3Eagle3Model"], "ttt_length": 7}
            outputs = [tap - 1 for tap in self.taps]
            config = {**inner, **own, "target_layer_ids": outputs, "model_type": "qwen3"}
        else:
            outer["architectures"] = ["LlamaForCausalLMEagle3"]
            if layout == "specforge":  # names layers by their outputs
                outer["eagle_config"] = {
                    "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.taps]
                }
            config = {**outer, **inner}
        config.update(changes)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {
            names[name]: np.ascontiguousarray(weight) for name, weight in self.weights.items()
        }
        save_file(tensors, folder / "model.safetensors")
        return folder


_GGUF_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
}
_IN_LAYER = {
    "hidden_norm": "attn_norm_2",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name.replace("midlayer.", "layers.0."))
    if match is None:
        return _GGUF_NAMES.get(name, name)
    return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def linear(layer: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """A matrix of a layer, and its bias if it has one."""
    product = x @ layer[f"{name}.weight"].T
    bias = layer.get(f"{name}.bias")
    return product if bias is None else product + bias


@dataclass(frozen=True)
class Variant:
    """What heads differ in, beside their numbers."""

    draft_tokens: int | None = 48
    own_embedding: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    head_norms: bool = False
    n_kv_heads: int = 2
    target_hidden: int | None = None
    n_layers: int = 1
    biased: bool = False
    mask: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)


def random_eagle3(
    hidden: int, vocab_size: int, variant: Variant | None = None, *, seed: int = 0
) -> TinyEagle3:
    """Random weights; the draft vocabulary is drawn from the tokens."""
    variant = variant or Variant()
    rng = np.random.default_rng(seed)
    heads, wide, d = 4, 64, hidden // 4
    n_taps = len(variant.changes.get("taps", (1, 3, 5)))
    features = n_taps * (variant.target_hidden or hidden)

    def matrix(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(n: int) -> npt.NDArray[np.float32]:
        return (1 + 0.1 * rng.normal(size=n)).astype(np.float32)

    def layer(start: str, reads: int) -> dict[str, npt.NDArray[Any]]:
        return {
            f"{start}input_layernorm.weight": norm(hidden),
            f"{start}post_attention_layernorm.weight": norm(hidden),
            f"{start}self_attn.q_proj.weight": matrix(heads * d, reads),
            f"{start}self_attn.k_proj.weight": matrix(variant.n_kv_heads * d, reads),
            f"{start}self_attn.v_proj.weight": matrix(variant.n_kv_heads * d, reads),
            f"{start}self_attn.o_proj.weight": matrix(hidden, heads * d),
            f"{start}mlp.gate_proj.weight": matrix(wide, hidden),
            f"{start}mlp.up_proj.weight": matrix(wide, hidden),
            f"{start}mlp.down_proj.weight": matrix(hidden, wide),
        }

    weights: dict[str, npt.NDArray[Any]] = {
        "fc.weight": matrix(hidden, features),
        "midlayer.hidden_norm.weight": norm(hidden),
        **layer("midlayer.", 2 * hidden),
        "norm.weight": norm(hidden),
    }
    starts = ["midlayer.", *(f"layers.{number}." for number in range(1, variant.n_layers))]
    for start in starts[1:]:
        weights |= layer(start, hidden)
    for start in starts if variant.head_norms else ():
        weights |= {f"{start}self_attn.{part}_norm.weight": norm(d) for part in "qk"}
    if variant.biased:
        biases = {n: len(a) for n, a in weights.items() if "_proj." in n}
        weights |= {n.replace(".weight", ".bias"): norm(rows) - 1 for n, rows in biases.items()}
    if variant.mask is not None:
        weights["mask_hidden"] = matrix(1, 1, features) * np.float32(features**0.5)
    if variant.norm_before_fc:
        weights["input_norm.weight"] = norm(features)
    if variant.fc_norm:
        weights |= {f"fc_norm.{i}.weight": norm(features // n_taps) for i in range(n_taps)}
    if variant.own_embedding:
        weights["embed_tokens.weight"] = matrix(vocab_size, hidden) * np.float32(hidden**0.5)
    if variant.draft_tokens is not None:
        ids = np.sort(rng.choice(vocab_size, variant.draft_tokens, replace=False))
        weights["d2t"] = ids - np.arange(len(ids))
        weights["t2d"] = np.isin(np.arange(vocab_size), ids)
        weights["lm_head.weight"] = 3 * matrix(variant.draft_tokens, hidden)
    tiny = TinyEagle3(weights, n_kv_heads=variant.n_kv_heads, mask=variant.mask)
    return replace(tiny, **variant.changes)
