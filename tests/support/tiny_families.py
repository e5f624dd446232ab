"""Tiny random checkpoints of every family that can be converted, saved by transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from support import tiny_tokenizers

SENTENCEPIECE = ("llama", "newer llama", "gemma")
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 608,  # a few rows more than there are tokens
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,  # the least context that llama.cpp makes
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
_PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
_GEMMA4_ROPE = [
    {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": part,
            "rope_theta": 50_000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    for part in (0.25, 0.5)
]
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "rope_parameters": _GEMMA4_ROPE[0],
}
_WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4_SHARED = {
    **_GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": _WINDOWS * 2,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 608,
}
_GEMMA4_EXPERTS = {
    **_GEMMA4,
    "layer_types": _WINDOWS,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_QWEN35 = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
}
_GLM = {"head_dim": 16, "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5}}
_GPT_OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 16, "rope_parameters": {**_YARN, "truncate": True}}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One checkpoint: transformers' class, what its config has, its tokenizer, and one thing that
    must matter.

    `tokenizer` is llama.cpp's name of a pre-tokenizer, or one of SENTENCEPIECE; `model_file` is
    whether tokenizer.model is there. `wrong` is a change of the config that the comparison must
    notice.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    tokenizer: str
    wrong: dict[str, Any]
    model_file: bool = True
    lengths: tuple[int, ...] = field(default=(24, 100))


FAMILIES = (
    Family("llama2", "Llama", {}, "llama", {"rope_parameters": _PLAIN}),
    Family("vicuna json only", "Llama", {"num_key_value_heads": 4}, "newer llama",
    {"rms_norm_eps": 0.1},
           model_file=False),
    Family("llama3", "Llama", {"rope_parameters": _LLAMA3, "attention_bias": True}, "llama-bpe",
           {"rope_parameters": {**_LLAMA3, "rope_type": "default"}}),
    Family("llama linear", "Llama", {"rope_parameters": {**_PLAIN, "rope_type": "linear",
    "factor": 4.0}}, "llama",
           {"rope_parameters": _PLAIN}),
    Family("smollm", "Llama", {"tie_word_embeddings": True}, "smollm", {"rope_parameters": _PLAIN}),
    Family("mistral", "Mistral", {"sliding_window": 100}, "llama", {"sliding_window": 50}),
    Family("mistral nemo", "Mistral", {"head_dim": 32, "sliding_window": None}, "tekken",
    {"sliding_window": 50}),
    Family("mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "llama",
    {"num_experts_per_tok": 1}),
    Family("qwen3 moe", "Qwen3Moe", {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True}, "qwen2", {"norm_topk_prob": False}),
    Family("gemma", "Gemma", {"head_dim": 32}, "gemma", {"rms_norm_eps": 0.1}),
    Family("smollm3", "SmolLM3", {"num_hidden_layers": 5}, "llama-bpe", {"no_rope_layers": [1, 1, 1,
    1, 1]}),
    Family("qwen2", "Qwen2", {}, "qwen2", {"rope_parameters": _PLAIN}),
    Family("qwen2 yarn", "Qwen2", {"rope_parameters": _YARN, "tie_word_embeddings": True}, "qwen2",
           {"rope_parameters": _PLAIN}),
    Family("qwen3", "Qwen3", {"head_dim": 32}, "qwen2", {"rms_norm_eps": 0.1}),
    Family("qwen3 yarn", "Qwen3", {"head_dim": 32, "rope_parameters": {**_YARN,
    "attention_factor": 1.3}}, "qwen2",
           {"rope_parameters": _YARN}),
    Family("gemma2", "Gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0}, "gemma",
           {"attn_logit_softcapping": None}),
    Family("gemma3", "Gemma3", {**_GEMMA, "num_hidden_layers": 7}, "gemma", {"sliding_window": 64}),
    Family("gemma3 scaled", "Gemma3",
           {**_GEMMA, "num_hidden_layers": 4, "layer_types": ["sliding_attention",
           "full_attention"] * 2,
            "rope_parameters": _GEMMA_ROPE},
           "gemma", {"layer_types": ["full_attention", "sliding_attention"] * 2}, model_file=False),
    Family("gemma4", "Gemma4", _GEMMA4_SHARED, "gemma", {"rope_parameters": _GEMMA4_ROPE[1]}),
    Family("gemma4 experts", "Gemma4", _GEMMA4_EXPERTS, "gemma", {"top_k_experts": 1}),
    Family("qwen3.5", "Qwen3_5", _QWEN35, "qwen2", {"rms_norm_eps": 0.1}),
    Family("qwen3.5 moe", "Qwen3_5Moe", {**_QWEN35, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}, "qwen2",
           {"num_experts_per_tok": 1}),
    Family("glm4", "Glm4", _GLM, "qwen2", {"rms_norm_eps": 0.1}),
    Family("glm4 moe", "Glm4Moe", {**_GLM, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "use_qk_norm": True, "routed_scaling_factor": 1.5}, "qwen2",
           {"num_experts_per_tok": 1}),
    Family("gpt-oss", "GptOss", _GPT_OSS, "gpt-4o",
           {"rope_parameters": _PLAIN}),
    Family("phi3", "Phi3", {}, "llama", {"rope_parameters": _PLAIN}),
    Family("phi3 longrope", "Phi3", {"rope_parameters": _LONG,
    "original_max_position_embeddings": 256,
                                     "max_position_embeddings": 1024}, "llama",
           {"rope_parameters": {**_LONG, "long_factor": _LONG["short_factor"],
           "short_factor": _LONG["long_factor"]}},
           lengths=(24, 300)),
    Family("phi4 mini", "Phi3", {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.75},
                                 "tie_word_embeddings": True}, "gpt-4o",
           {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5}}),
)  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A saved checkpoint, with the model and the tokenizer that it was saved from."""

    family: Family
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def build(family: Family, folder: Path) -> Built:
    """Make the checkpoint in `folder`, with random weights that make every part of the model
    matter."""
    folder.mkdir()
    tokenizer = _tokenizer(family, folder)
    model = _model(family, {})
    with torch.no_grad():
        source = torch.Generator().manual_seed(0)
        for name, weights in model.named_parameters():
            spread = weights.shape[-1] ** -0.5 if weights.dim() > 1 else 0.125
            if family.architecture == "Gemma" and "down_proj" in name:
                spread *= 0.05  # as below, of one without a norm there
            weights.copy_(
                torch.randn(weights.shape, generator=source) * spread + _mean(family, name)
            )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not family.model_file:
        (folder / "tokenizer.model").unlink()
    return Built(family, folder, model, tokenizer)


def _mean(family: Family, name: str) -> float:
    if "norm" not in name:
        return 0.0
    if family.architecture.startswith("Qwen3_5"):  # stored less 1, but for one
        return float("linear_attn" in name)
    if "Gemma" not in family.architecture:
        return 1.0
    if family.architecture == "Gemma4":  # stored as they are; little of the network, as below
        return 0.01 if "post_feedforward" in name or "post_per_layer" in name else 1.0
    # Gemma's norms are stored less 1. Its feed-forward part gets a twentieth of its weight:
    # llama.cpp's CPU backend looks GELU up in a table of float16, which would move logits by 5e-4
    # otherwise.
    return -0.95 if "post_feedforward" in name else 0.0


def _tokenizer(family: Family, folder: Path) -> PreTrainedTokenizerBase:
    styles: dict[str, Callable[[Path], PreTrainedTokenizerBase]] = {
        "llama": tiny_tokenizers.llama_style,
        "newer llama": tiny_tokenizers.newer_llama_style,
        "gemma": tiny_tokenizers.gemma_style,
    }
    style = styles.get(family.tokenizer)
    return style(folder) if style else tiny_tokenizers.byte_level(family.tokenizer)


def _model(family: Family, changes: dict[str, Any]) -> PreTrainedModel:
    suffix = "Text" if family.architecture in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else ""
    config_name = f"{family.architecture}{suffix}Config"
    settings = copy.deepcopy(
        {**_SHAPE, "bos_token_id": 1, "eos_token_id": 2, **family.config, **changes}
    )
    config = getattr(transformers, config_name)(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family.architecture}ForCausalLM")(config).eval()
    if family.architecture == "Gemma4":  # it has GELU where no norm makes little of it
        for module in model.modules():
            if hasattr(module, "act_fn"):
                module.act_fn = TableGelu()
    return model


class TableGelu(torch.nn.Module):
    """GELU as llama.cpp computes it on CPUs: out of a table from half floats to half floats."""

    def forward(self, rows: Any) -> Any:
        return torch.nn.functional.gelu(rows.half().float(), approximate="tanh").half().float()


def transformers_logits(
    built: Built, tokens: Sequence[int], *, wrong: bool = False
) -> npt.NDArray[np.float32]:
    """Transformers' logits after each token, float32; with `wrong`, of the model with its config
    changed."""
    model = built.model
    if wrong:
        model = _model(built.family, built.family.wrong)
        model.load_state_dict(built.model.state_dict())
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].numpy()
