"""The demo family's tokenizer and Hugging Face folder: config.json, weights and tokenizer files.

The tokenizer is a byte-level BPE, split the way llama.cpp's "gpt-2" pre-tokenizer splits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from family.llama import Llama
from specrun.train.trainer.model_folder import write_json, write_weights

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
    """Train a byte-level BPE of `vocab_size` tokens, if the texts have that many."""
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
    names = {
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": max_length,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", names)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer.json of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token that the tokenizer must have, such as one of SPECIAL_TOKENS."""
    found = tokenizer.token_to_id(text)
    if found is None:
        raise ValueError(f"the tokenizer has no token {text!r}")
    return int(found)


def save_folder(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write an ordinary Hugging Face folder, in float32; the weights come last."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    config = shape.llama_config(
        architectures=["LlamaForCausalLM"],
        head_dim=shape.head_size,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )
    write_json(folder / "config.json", config)
    save_tokenizer_files(tokenizer, folder, shape.max_positions)
    write_weights(folder / "model.safetensors", model.state_dict())
