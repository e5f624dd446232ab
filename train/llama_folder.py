"""The Hugging Face folder of a trained Llama: config.json, weights and tokenizer files that others can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from specrun.runtime.atomic import atomic_path
from specrun.train.llama import Llama, LlamaShape
from specrun.train.tokenizer import END, save_tokenizer_files, token_id


def hf_config(shape: LlamaShape, end_id: int) -> dict[str, Any]:
    """The config.json of a LlamaForCausalLM of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": end_id,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
    }


def save_folder(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write an ordinary Hugging Face folder: config, weights in float32, tokenizer; the weights come last."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(model.shape, token_id(tokenizer, END))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tokenizer_files(tokenizer, folder, model.shape.max_positions)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with atomic_path(folder / "model.safetensors", force=True) as aside:
        save_file(weights, aside, metadata={"format": "pt"})
