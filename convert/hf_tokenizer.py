"""Reads a Hugging Face tokenizer (tokenizer.json and what lies beside it) into a vocabulary for GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.checkpoint import Checkpoint
from specrun.convert.json_file import JsonObject, read_json_object
from specrun.convert.vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED, BytePairVocabulary

__all__ = ["read_vocabulary"]

# Our names of special tokens (llama.cpp's keys) and the checkpoint's.
_SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def read_vocabulary(checkpoint: Checkpoint, *, pre: str | None = None) -> BytePairVocabulary:
    """Return the vocabulary of a checkpoint, filled up to the size its config states.

    `pre` names the way text is split before merging, where it is not to be recognised.

    Raises UnsupportedModelError for anything but byte-level BPE split in a way llama.cpp knows,
    MalformedFileError for files that contradict themselves or each other.
    """
    tokenizer = read_json_object(checkpoint.folder / "tokenizer.json")
    settings = checkpoint.optional("tokenizer_config.json")
    pre = pre or _pre_tokenizer_name(tokenizer)
    words, types = _read_words(tokenizer, checkpoint.config.count("vocab_size"))
    special = _special_ids(checkpoint, settings, words)
    return BytePairVocabulary(
        words=tuple(words),
        types=tuple(types),
        merges=tuple(_read_merges(tokenizer)),
        special_ids=special,
        pre=pre,
        add_bos=_adds(tokenizer, settings, "bos", first=True),
        add_eos=settings.flag("add_eos_token") if "add_eos_token" in settings else None,
        chat_template=_chat_template(checkpoint, settings),
    )


def _read_words(tokenizer: JsonObject, size: int) -> tuple[list[str], list[int]]:
    known = tokenizer.object("model").object("vocab")
    pairs = [(word, NORMAL, token) for word, token in known.values.items()]
    for entry in tokenizer.items("added_tokens"):
        added = JsonObject(entry if isinstance(entry, dict) else {}, f"an added token in {tokenizer.shown}")
        kind = CONTROL if added.flag("special", False) else USER_DEFINED
        pairs.append((added.text("content"), kind, added.any("id")))
    words: list[str | None] = [None] * min(size, len(pairs) + (1 << 20))
    types = [UNUSED] * len(words)
    for word, kind, token in pairs:
        if type(token) is not int or not 0 <= token < len(words):
            raise MalformedFileError(
                f"{tokenizer.shown} gives {word[:40]!r} the id {token!r}, outside the model's {size} words"
            )
        if words[token] not in (None, word):
            raise MalformedFileError(f"{tokenizer.shown} gives the id {token} to {words[token]!r} and {word[:40]!r}")
        words[token], types[token] = word, kind
    if len(words) < size:
        raise MalformedFileError(f"the config states {size} words, and {tokenizer.shown} has {len(pairs)}")
    # The embedding matrix is often rounded up: its last rows belong to no word.
    return [f"[PAD{token}]" if word is None else word for token, word in enumerate(words)], types


def _read_merges(tokenizer: JsonObject) -> list[str]:
    merges = []
    for entry in tokenizer.object("model").items("merges"):
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
            raise MalformedFileError(f"{tokenizer.shown} has a merge {str(entry)[:60]!r}, which is not two words")
        merges.append(" ".join(parts))
    if not merges:
        raise MalformedFileError(f"{tokenizer.shown} has no merges, which a BPE tokenizer needs")
    return merges


def _is_gpt2(pre: Any) -> bool:  # noqa: ANN401 - any JSON value
    return isinstance(pre, dict) and (
        pre.get("type") == "ByteLevel" and not pre.get("add_prefix_space") and pre.get("use_regex", True) is True
    )


# How text is split before merging: llama.cpp's name, and whether tokenizer.json's `pre_tokenizer` is it.
_PRE_TOKENIZERS: tuple[tuple[str, Callable[[Any], bool]], ...] = (("gpt-2", _is_gpt2),)


def _pre_tokenizer_name(tokenizer: JsonObject) -> str:
    model = tokenizer.object("model")
    if model.text("type", "BPE") != "BPE" or "vocab" not in model:
        raise UnsupportedModelError(f"{tokenizer.shown} is a {model.any('type')} tokenizer: only BPE is known")
    for key in ("byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.any(key):
            raise UnsupportedModelError(f"{tokenizer.shown} has {key} = {model.any(key)!r}, which is not known here")
    if "normalizer" in tokenizer:
        raise UnsupportedModelError(f"{tokenizer.shown} has the unknown normalizer {_short(tokenizer, 'normalizer')}")
    pre = tokenizer.any("pre_tokenizer")
    for name, fits in _PRE_TOKENIZERS:
        if fits(pre):
            return name
    raise UnsupportedModelError(f"{tokenizer.shown} has the unknown pre_tokenizer {_short(tokenizer, 'pre_tokenizer')}")


def _short(tokenizer: JsonObject, key: str) -> str:
    text = json.dumps(tokenizer.any(key))
    return text if len(text) <= 400 else text[:400] + "..."


def _special_ids(checkpoint: Checkpoint, settings: JsonObject, words: list[str]) -> dict[str, int]:
    names = checkpoint.optional("special_tokens_map.json")
    generation = checkpoint.optional("generation_config.json")
    found: dict[str, int] = {}
    for ours, theirs in _SPECIAL_NAMES.items():
        token = _named_word(settings, f"{theirs}_token", words)
        if token is None:
            token = _named_word(names, f"{theirs}_token", words)
        for source in (checkpoint.config, generation):
            if token is None and source.any(f"{theirs}_token_id") != []:
                token = _first_id(source, f"{theirs}_token_id")
        if token is not None and token < len(words):
            found[ours] = token
    # Where a file names no bos, llama.cpp would take word 11; as in GPT-2, one word serves as both.
    if "bos" not in found and "eos" in found:
        found["bos"] = found["eos"]
    ends = generation.any("eos_token_id")
    others = [end for end in ends if end != found.get("eos")] if isinstance(ends, list) else []
    # llama.cpp stops at any of its named end tokens; a second one of the checkpoint is an end of turn.
    if others and type(others[0]) is int and 0 <= others[0] < len(words):
        found["eot"] = others[0]
    return found


def _first_id(source: JsonObject, key: str) -> int | None:
    value = source.any(key)
    return JsonObject({key: value[0] if isinstance(value, list) else value}, source.shown).token(key)


def _named_word(settings: JsonObject, key: str, words: list[str]) -> int | None:
    value = settings.any(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str) or value not in words:
        raise MalformedFileError(f"{settings.shown} has {key} = {str(value)[:40]!r}, which the tokenizer does not have")
    return words.index(value)


def _adds(tokenizer: JsonObject, settings: JsonObject, name: str, *, first: bool) -> bool:
    """Whether encoding adds the token `name` at the start (`first`) or end."""
    if f"add_{name}_token" in settings:
        return settings.flag(f"add_{name}_token")
    post = tokenizer.any("post_processor")
    stages = post.get("processors", [post]) if isinstance(post, dict) else []
    for stage in stages if isinstance(stages, list) else []:
        pieces = stage.get("single") if isinstance(stage, dict) and stage.get("type") == "TemplateProcessing" else None
        if isinstance(pieces, list) and pieces and isinstance(pieces[0 if first else -1], dict):
            return "SpecialToken" in pieces[0 if first else -1]
    return False


def _chat_template(checkpoint: Checkpoint, settings: JsonObject) -> str | None:
    beside = checkpoint.folder / "chat_template.jinja"
    if beside.exists():
        try:
            return beside.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MalformedFileError(f"{beside} cannot be read as UTF-8 text ({error})") from error
    value = settings.any("chat_template")
    if isinstance(value, list):  # several named ones
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise MalformedFileError(f"{settings.shown} has a chat_template that is not a string")
    return value
