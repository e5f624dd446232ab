"""The family's tokenizer: byte-level BPE, split the way llama.cpp's "gpt-2" pre-tokenizer splits.

The Hugging Face folder of a trained Llama: config.json, weights and tokenizer files that others can
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specrun.bindings.atomic import atomic_path
from specrun.train.family.llama import Llama, LlamaShape

END, USER, ASSISTANT, SYSTEM = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, SYSTEM)
"""In the order of their ids, which begin at 0."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` tokens (if the texts have that many) on
    `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer_files(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the three tokenizer files that Hugging Face tools expect in a model folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "model_max_length": max_length,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
    names = {
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
    }
    _write_json(folder / "special_tokens_map.json", names)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer.json of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token that the tokenizer must have, such as one of SPECIAL_TOKENS."""
    found = tokenizer.token_to_id(text)
    if found is None:
        raise ValueError(f"the tokenizer has no token {text!r}")
    return int(found)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


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
    """Write an ordinary Hugging Face folder: config, weights in float32, tokenizer; the weights
    come last."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(model.shape, token_id(tokenizer, END))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tokenizer_files(tokenizer, folder, model.shape.max_positions)
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    with atomic_path(folder / "model.safetensors", force=True) as aside:
        save_file(weights, aside, metadata={"format": "pt"})
