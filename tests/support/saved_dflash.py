"""Checkpoint folders of tiny block drafters, in every published layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from support.tiny_dflash import TinyDFlash

Layout = Literal["z-lab", "deepspec", "speculators"]
_NAMES = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}


def published_name(name: str) -> str:
    """The name of a GGUF file's tensor in a checkpoint."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)(\.weight)?", name)
    if match is None:
        return _NAMES.get(name, name)
    return f"layers.{match[1]}.{_IN_LAYER[match[2]]}{match[3] or ''}"


def published_tensors(drafter: TinyDFlash) -> dict[str, npt.NDArray[Any]]:
    """The drafter's tensors as its authors' programs save them."""
    found = {published_name(name): array for name, array in drafter.tensors().items()}
    if "d2t" in found:
        ids = found["d2t"]
        found["d2t"] = ids - np.arange(len(ids))
        found["t2d"] = np.isin(np.arange(drafter.vocab_size), ids)
    if drafter.head != "vanilla":
        name = "gate_proj" if drafter.head == "gated" else "joint_proj"
        weight, bias = drafter.latent_matrix()
        found |= {f"markov_head.{name}.weight": weight, f"markov_head.{name}.bias": bias}
    return found


def published_config(drafter: TinyDFlash, layout: Layout) -> dict[str, Any]:
    """The config.json of a drafter, in one of the layouts."""
    sizes = {
        "model_type": "qwen3",
        "hidden_size": drafter.width,
        "num_hidden_layers": drafter.layers,
        "num_attention_heads": drafter.heads,
        "num_key_value_heads": drafter.kv_heads,
        "head_dim": drafter.head_width,
        "intermediate_size": drafter.ffn,
        "vocab_size": drafter.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": drafter.context,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": [
            "sliding_attention" if drafter.window and (drafter.whole_window or i % 2 == 0)
            else "full_attention"
            for i in range(drafter.layers)
        ],
        "sliding_window": drafter.window or None,
        "use_sliding_window": drafter.window > 0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    heads: dict[str, Any] = {}
    if drafter.generation == "dspark":
        heads = {"markov_rank": drafter.rank, "markov_head_type": drafter.head}
        heads |= {"enable_confidence_head": drafter.confidence}
        heads |= {"confidence_head_with_markov": True}
    if drafter.generation == "dflash2":
        heads = {"conv_kernel_size": drafter.kernel, "conv_group_size": drafter.group}
        heads |= {"selector_rank": drafter.rank, "selector_top_k": drafter.top_k}
    outputs = [tap - 1 for tap in drafter.taps]
    if layout == "z-lab":
        name = "DFlash2DraftModel" if drafter.generation == "dflash2" else "DFlashDraftModel"
        inner = {"mask_token_id": drafter.mask, "target_layer_ids": outputs, **heads}
        inner |= {"causal": True} if drafter.causal else {}
        top = {"block_size": drafter.block_size, "dflash_config": inner}
        return {**sizes, "architectures": [name], **top}
    if layout == "deepspec":
        top = {"block_size": drafter.block_size, "mask_token_id": drafter.mask, **heads}
        top |= {"target_layer_ids": outputs, "num_anchors": 512}
        return {**sizes, "architectures": ["Qwen3DSparkModel"], **top}
    kind = "dspark" if drafter.generation == "dspark" else "dflash"
    return {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": sizes,
        "draft_vocab_size": drafter.draft_tokens or drafter.vocab_size,
        "block_size": drafter.block_size,
        "aux_hidden_state_layer_ids": list(drafter.taps),
        "mask_token_id": drafter.mask,
        "sliding_window_non_causal": not drafter.causal,
        "sample_from_anchor": kind == "dspark" and drafter.from_anchor,
        **heads,
    }


def save_published(
    folder: Path,
    drafter: TinyDFlash,
    layout: Layout,
    *,
    weights: Mapping[str, npt.NDArray[Any] | None] | None = None,
    **changes: Any,
) -> Path:
    """Write a checkpoint folder; `changes` are other values of its config, None to leave one out.

    `weights` are other tensors by their names, None to leave one out.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {**published_config(drafter, layout), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    found = {**published_tensors(drafter), **(weights or {})}
    kept = {name: np.ascontiguousarray(a) for name, a in found.items() if a is not None}
    save_file(kept, folder / "model.safetensors")
    return folder
