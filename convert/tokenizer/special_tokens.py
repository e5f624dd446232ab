"""Special tokens of a checkpoint: which they are, which are added to a text; the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specrun.bindings.errors import MalformedFileError
from specrun.convert.checkpoint import Checkpoint, JsonObject

# Our names of special tokens (llama.cpp's keys) and the checkpoint's.
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# llama.cpp ends an answer at these by their text.
_KNOWN_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    *("<|eom_id|>", "<EOT>", "<|end_of_text|>", "<eos>"),
}


def special_ids(
    checkpoint: Checkpoint, settings: JsonObject, tokens: Sequence[str], usual: Mapping[str, int]
) -> dict[str, int]:
    """Return the ids of bos, eos, unknown, padding, and of further ends of an answer (eot, eom).

    The tokenizer's settings count first, then the config, then `usual`. Raises MalformedFileError
    for a token that the tokenizer does not have.
    """
    generation = checkpoint.optional("generation_config.json")
    named = checkpoint.optional("special_tokens_map.json")
    found: dict[str, int] = {}
    for ours, theirs in _NAMES.items():
        token = _named_token(settings, f"{theirs}_token", tokens)
        token = _named_token(named, f"{theirs}_token", tokens) if token is None else token
        for source in (checkpoint.config, generation):
            if token is None:
                token = next(iter(_ids(source, f"{theirs}_token_id")), None)
        token = usual.get(ours) if token is None else token
        if token is not None and token < len(tokens):
            found[ours] = token
    # Where a file names no bos, llama.cpp would take token 11; as in GPT-2, eos serves as both.
    if "bos" not in found and "eos" in found:
        found["bos"] = found["eos"]
    ends = _ids(generation, "eos_token_id") or _ids(checkpoint.config, "eos_token_id")
    # llama.cpp also stops at the tokens it is told of as end of turn and end of message.
    others = dict.fromkeys(end for end in ends if end != found.get("eos") and end < len(tokens))
    unknown = [end for end in others if tokens[end] not in _KNOWN_ENDS]
    found.update(zip(("eot", "eom"), unknown, strict=False))
    return found


def _ids(source: JsonObject, key: str) -> list[int]:
    value = source.any(key)
    entries = value if isinstance(value, list) else [value]
    tokens = (JsonObject({key: entry}, source.shown).token(key) for entry in entries)
    return [token for token in tokens if token is not None]


def _named_token(settings: JsonObject, key: str, tokens: Sequence[str]) -> int | None:
    value = settings.any(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str) or value not in tokens:
        raise settings.malformed(f"has {key} = {str(value)[:40]!r}, which the tokenizer lacks")
    return tokens.index(value)


def adds_token(
    tokenizer: JsonObject, settings: JsonObject, name: str, *, usual: bool = False
) -> bool:
    """Return whether encoding adds the token `name`: "bos" at the start, "eos" at the end.

    The settings count first, then what tokenizer.json does after encoding, then `usual`.
    """
    if f"add_{name}_token" in settings:
        return settings.flag(f"add_{name}_token")
    if not tokenizer.values:
        return usual
    post: Any = tokenizer.any("post_processor")
    stages = post.get("processors", [post]) if isinstance(post, dict) else []
    for stage in stages if isinstance(stages, list) else []:
        is_template = isinstance(stage, dict) and stage.get("type") == "TemplateProcessing"
        pieces = stage.get("single") if is_template else None
        edge = 0 if name == "bos" else -1
        if isinstance(pieces, list) and pieces and isinstance(pieces[edge], dict):
            return "SpecialToken" in pieces[edge]
    return False


def chat_template(checkpoint: Checkpoint, settings: JsonObject) -> str | None:
    """Return the template of chat_template.jinja or .json, or the settings' own or default one."""
    beside = checkpoint.folder / "chat_template.jinja"
    if beside.exists():
        try:
            return beside.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MalformedFileError(f"{beside} cannot be read as UTF-8 text ({error})") from error
    value = settings.any("chat_template")
    if value is None:
        value = checkpoint.optional("chat_template.json").any("chat_template")
    if isinstance(value, list):  # several named ones
        named = (entry for entry in value if isinstance(entry, dict))
        default = (entry.get("template") for entry in named if entry.get("name") == "default")
        value = next(default, None)
    if value is not None and not isinstance(value, str):
        raise settings.malformed("has a chat_template that is not a string")
    return value
