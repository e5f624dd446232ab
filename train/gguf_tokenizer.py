"""The tokenizer of a GGUF file as the files that Hugging Face tools read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.bindings.gguf_header import ArrayValue, GGUFHeader
from specrun.convert.vocabulary import CONTROL, USER_DEFINED

__all__ = ["tokenizer_from_gguf", "tokenizer_settings"]

_KEY = "tokenizer.ggml."


def tokenizer_from_gguf(header: GGUFHeader, path: Path) -> Tokenizer:
    """Return the byte-level BPE tokenizer of the file in `path`, whose header is given.

    Raises UnsupportedModelError for other kinds and other ways of splitting text than GPT-2's.
    """
    kind, pre = (header.metadata.get(_KEY + name) for name in ("model", "pre"))
    if (kind, pre) != ("gpt2", "gpt-2"):
        raise UnsupportedModelError(
            f"{path} has a tokenizer of kind {kind!r} that splits text as {pre!r}: only 'gpt2' with 'gpt-2' can be "
            "read back; use the folder it was converted from"
        )
    words, types, merges = (_list(header, name, path) for name in ("tokens", "token_type", "merges"))
    vocabulary = {str(word): token for token, word in enumerate(words)}
    # A file of a tokenizer without merges has one of two words that are no longer than a byte each, which does no harm.
    pairs = [tuple(str(merge).split(" ", 1)) for merge in merges]
    known = [pair for pair in pairs if len(pair) == 2 and "".join(pair) in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=known))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    for word, number in zip(words, types, strict=True):
        if number == CONTROL:
            tokenizer.add_special_tokens([AddedToken(str(word), normalized=False)])
        elif number == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(str(word), normalized=False)])
    misplaced = next((word for token, word in enumerate(words) if tokenizer.token_to_id(str(word)) != token), None)
    if misplaced is not None:
        raise MalformedFileError(f"{path} has the word {misplaced!r} more than once in its vocabulary")
    return tokenizer


def tokenizer_settings(header: GGUFHeader, path: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: special words, what is added to texts, the chat template."""
    words = _list(header, "tokens", path)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        token = header.metadata.get(f"{_KEY}{ours}_token_id")
        if isinstance(token, int):
            settings[f"{theirs}_token"] = words[token]
    for name in ("bos", "eos"):
        settings[f"add_{name}_token"] = bool(header.metadata.get(f"{_KEY}add_{name}_token", False))
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return settings


def write_tokenizer(header: GGUFHeader, path: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    tokenizer_from_gguf(header, path).save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_settings(header, path), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _list(header: GGUFHeader, name: str, path: Path) -> list[Any]:
    value = header.metadata.get(_KEY + name)
    if not isinstance(value, ArrayValue):
        raise MalformedFileError(f"{path} has no list {_KEY}{name}")
    return value.tolist()
