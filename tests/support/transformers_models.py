"""Tiny transformers models written as GGUF files: the reference for other files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.convert.random_model import synthetic_vocabulary

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

torch.set_num_threads(1)  # other threads would wait in loops for tensors this small

VOCAB = 96
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    **{
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "attn_implementation": "eager",
    },
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True},
}
_GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen3": ("Qwen3", {"use_sliding_window": False}),
    "smollm3": ("SmolLM3", {"use_sliding_window": False}),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": ("Gemma3", _GEMMA),
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def make_model(architecture: str, n_layers: int, seed: int = 0) -> Any:
    """Return a model with random weights, norms included, so that every tensor in the wrong place
    is seen."""
    family, options = FAMILIES[architecture]
    suffix = "Text" if architecture == "gemma3" else ""
    config = getattr(transformers, f"{family}{suffix}Config")(
        **SHAPE, **options, num_hidden_layers=n_layers
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.ndim == 1 else 0.2))
            if "norm" in name and "gemma" not in architecture:
                weight.add_(1.0)
            if "post_feedforward" in name:
                # Where a number lies between two half floats (see _Gelu), the last bits decide: let
                # little hang on it.
                weight.mul_(0.2).add_(-0.9)
    if "gemma" in architecture:
        for layer in model.model.layers:
            layer.mlp.act_fn = _Gelu()
    return model


class _Gelu(torch.nn.Module):
    """GELU as llama.cpp computes it on CPUs: out of a table from half floats to half floats."""

    def forward(self, rows: Any) -> Any:
        return torch.nn.functional.gelu(rows.half().float(), approximate="tanh").half().float()


def model_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return the logits after each token."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([list(tokens)]), use_cache=False).logits[0])


def keep_layers(model: Any, kept: Sequence[int]) -> Any:
    """Take all but these layers out of a model."""
    model.model.layers = torch.nn.ModuleList([model.model.layers[layer] for layer in kept])
    config = model.config
    for name in ("layer_types", "no_rope_layers"):
        values = getattr(config, name, None)
        if values is not None:
            setattr(config, name, [values[layer] for layer in kept])
    config.num_hidden_layers = len(kept)
    return model


def write_model(path: Path, model: Any, architecture: str) -> Path:
    """Write a model as a GGUF file in F32."""
    config = model.config
    metadata = Metadata()
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": SHAPE["head_dim"],
        "attention.value_length": SHAPE["head_dim"],
    }
    if "gemma" in architecture:
        values["attention.sliding_window"] = config.sliding_window
        if architecture == "gemma2":
            metadata.number("gemma2.attn_logit_softcapping", config.attn_logit_softcapping)
            metadata.number("gemma2.final_logit_softcapping", config.final_logit_softcapping)
    for key, value in values.items():
        metadata.count(f"{architecture}.{key}", value)
    ropes = config.rope_parameters
    theta = (
        ropes["full_attention"]["rope_theta"] if "full_attention" in ropes else ropes["rope_theta"]
    )
    metadata.number(f"{architecture}.rope.freq_base", theta)
    metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    metadata.text("general.name", "tiny")
    synthetic_vocabulary(VOCAB).describe(metadata)
    tensors = [
        _tensor(name, weight.detach().numpy(), architecture)
        for name, weight in model.named_parameters()
    ]
    write_gguf(path, architecture, metadata, tensors)
    return path


def _tensor(name: str, array: np.ndarray, architecture: str) -> PlannedTensor:
    if "norm" in name and "gemma" in architecture:
        array = array + 1.0
    if architecture in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
        # llama.cpp turns neighbours, transformers element i with element i + half.
        heads = len(array) // SHAPE["head_dim"]
        array = (
            array.reshape(heads, 2, SHAPE["head_dim"] // 2, -1).swapaxes(1, 2).reshape(array.shape)
        )
    array = np.ascontiguousarray(array, np.float32)
    return PlannedTensor(_gguf_name(name, architecture), array.shape, "F32", lambda: array)


def _gguf_name(name: str, architecture: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    names = {**_NAMES, **_GEMMA_NAMES} if "gemma" in architecture else _NAMES
    return f"blk.{layer}.{names[part]}.{kind}"
