"""A checkpoint's tokenizer as a vocabulary for GGUF, and its special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specrun.bindings.errors import MalformedFileError, OptionError, UnsupportedModelError
from specrun.convert.checkpoint import Checkpoint, JsonObject, read_json_object
from specrun.convert.tokenizer.pre_tokenizer import pre_tokenizer_name
from specrun.convert.tokenizer.sentencepiece_model import read_sentencepiece
from specrun.convert.tokenizer.vocabulary import (
    BYTE,
    NORMAL,
    SPACE,
    UNKNOWN,
    BytePairVocabulary,
    ScoredVocabulary,
    TokenTable,
    Vocabulary,
    added_tokens,
    read_merges,
)

# == Special tokens, those that are added to a text, and the chat template =========================


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

    The tokenizer's settings count first, then the config, then `usual`. A token that the settings
    name and that the tokenizer or the model does not have, such as a `[PAD]` that was added for
    training alone, counts as not named. Raises MalformedFileError if that leaves an answer no end.
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
        if token is None and ours == "eos" and "eos_token" in settings:
            named_end = str(settings.any("eos_token"))[:40]
            problem = f"has eos_token = {named_end!r}, which the tokenizer lacks"
            raise settings.malformed(f"{problem}, and no file names another end")
        if token is not None and token < len(tokens):
            found[ours] = token
    # If a file names no bos, llama.cpp would take token 11; as in GPT-2, eos serves as both.
    if "bos" not in found and "eos" in found:
        found["bos"] = found["eos"]
    ends = _ids(generation, "eos_token_id") or _ids(checkpoint.config, "eos_token_id")
    # llama.cpp also stops at the tokens that the file names as end of turn and end of message.
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
    if not isinstance(value, str):
        raise settings.malformed(f"has {key} = {str(value)[:40]!r}, which is no token")
    return tokens.index(value) if value in tokens else None


def _adds_token(
    tokenizer: JsonObject, settings: JsonObject, name: str, *, usual: bool = False
) -> bool:
    """Return whether encoding adds the token `name`: "bos" at the start, "eos" at the end.

    The settings count first, then tokenizer.json's steps after encoding, then `usual`.
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


def chat_templates(checkpoint: Checkpoint, settings: JsonObject) -> dict[str, str]:
    """Return the chat templates by name; the one of the name "default" comes first.

    They are chat_template.jinja and those in additional_chat_templates, or chat_template.json, or
    the settings' own. If there are several and none is the default, the first one is.
    """
    beside = checkpoint.folder / "chat_template.jinja"
    others = sorted((checkpoint.folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": beside} if beside.exists() else {}
    found = {name: _read_template(path) for name, path in files.items()}
    if not found:
        for source in (settings, checkpoint.optional("chat_template.json")):
            found = found or _stated_templates(source)
    found |= {path.stem: _read_template(path) for path in others if path.stem not in files}
    if found and "default" not in found:
        found = {"default": next(iter(found.values())), **found}
    return {name: found[name] for name in sorted(found, key=lambda name: name != "default")}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MalformedFileError(f"{path} cannot be read as UTF-8 text ({error})") from error


def _stated_templates(settings: JsonObject) -> dict[str, str]:
    """Return the templates of a JSON file: one text, a list of named ones, or a mapping."""
    value = settings.any("chat_template")
    if value is None:
        return {}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in entries}
    named = {"default": value} if isinstance(value, str) else value
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise settings.malformed("has a chat_template that is not a string")
    return named


# == Tokenizers: byte-level BPE, or SentencePiece's kind ===========================================
#
# tokenizer.json has byte-level BPE (GPT-2, Llama 3, Qwen: merges of bytes written as characters),
# or BPE with byte tokens `<0x0A>` made from a SentencePiece model (Llama 2, Gemma). tokenizer.model
# is such a model itself: pieces with scores, of which the highest merges first.


_BPE = 2
_ALGORITHMS = {1: "unigram", 3: "word", 4: "char"}
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_MOST_PADDING = 1 << 20  # tokens that a config may state beyond those of the tokenizer


def read_vocabulary(checkpoint: Checkpoint, *, pre: str | None = None) -> Vocabulary:
    """Return the vocabulary of a checkpoint, filled up to the size its config states.

    tokenizer.json may be byte-level BPE, or BPE with byte tokens (SentencePiece's kind), for which
    the scores of tokenizer.model are preferred; tokenizer.model alone does too. `pre` is
    llama.cpp's name of the way a byte-level tokenizer splits text, if that is not to be found
    out.

    Raises UnsupportedModelError for other kinds, OptionError for a `pre` that makes no sense,
    FileMissingError without any tokenizer, MalformedFileError for files that contradict themselves
    or each other.
    """
    folder = checkpoint.folder
    settings = checkpoint.optional("tokenizer_config.json")
    model_file = folder / "tokenizer.model"
    if model_file.exists() and not (folder / "tokenizer.json").exists():
        _refuse_pre(pre, model_file)
        absent = JsonObject({}, str(folder / "tokenizer.json"))
        return _read_scores(checkpoint, settings, absent, model_file)
    tokenizer = read_json_object(folder / "tokenizer.json")
    model = tokenizer.object("model")
    if model.text("type", "BPE") != "BPE" or "vocab" not in model:
        raise tokenizer.unsupported(f"is a {model.any('type')} tokenizer: only BPE is known")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.any(key):
            raise tokenizer.unsupported(f"has {key} = {model.any(key)!r}, which is not known here")
    if not model.flag("byte_fallback", False):
        return _byte_level(checkpoint, settings, tokenizer, pre)
    _refuse_pre(pre, folder / "tokenizer.json")
    if model_file.exists():
        return _read_scores(checkpoint, settings, tokenizer, model_file)
    return _read_merged_scores(checkpoint, settings, tokenizer)


def _refuse_pre(pre: str | None, path: Path) -> None:
    if pre is not None:
        raise OptionError(f"{path} is no byte-level tokenizer: leave the pre-tokenizer ({pre}) out")


def _byte_level(
    checkpoint: Checkpoint, settings: JsonObject, tokenizer: JsonObject, pre: str | None
) -> BytePairVocabulary:
    name = pre_tokenizer_name(tokenizer, checkpoint.folder / "tokenizer.json", pre)
    known = tokenizer.object("model").object("vocab").values
    added = list(added_tokens(checkpoint, tokenizer, settings))
    table = _table(checkpoint, len(known) + len(added), tokenizer.shown)
    for text, token in known.items():
        table.place(text, token)
    table.add(added)
    tokens = table.filled()
    return BytePairVocabulary(
        tokens=tokens,
        types=tuple(table.types),
        merges=tuple(" ".join(pair) for pair in read_merges(tokenizer)),
        special_ids=special_ids(checkpoint, settings, tokens, {}),
        pre=name,
        add_bos=_adds_token(tokenizer, settings, "bos"),
        add_eos=settings.flag("add_eos_token") if "add_eos_token" in settings else None,
        chat_templates=chat_templates(checkpoint, settings),
    )


def _table(checkpoint: Checkpoint, known: int, shown: str) -> TokenTable:
    size = checkpoint.config.count("vocab_size")
    if size > known + _MOST_PADDING:
        raise MalformedFileError(f"the config states {size} tokens, and {shown} has {known}")
    return TokenTable(size, shown)


def _read_scores(
    checkpoint: Checkpoint, settings: JsonObject, tokenizer: JsonObject, path: Path
) -> ScoredVocabulary:
    """Return the vocabulary of the tokenizer.model at `path`; `tokenizer` may be an empty object.

    Raises UnsupportedModelError for a model that is not BPE, or rewrites text in ways llama.cpp
    does not.
    """
    model = read_sentencepiece(path)
    if model.algorithm != _BPE:
        kind = _ALGORITHMS.get(model.algorithm, str(model.algorithm))
        raise UnsupportedModelError(f"{path} is a {kind} model: llama.cpp splits as BPE only")
    if model.has_character_map and not tokenizer.values:
        raise UnsupportedModelError(f"{path} rewrites characters (NFKC), which llama.cpp does not")
    table = _table(checkpoint, len(model.pieces), str(path))
    for token, piece in enumerate(model.pieces[: len(table.tokens)]):
        table.place(piece.text, token, piece.kind, piece.score)
    adds_space = settings.flag("add_prefix_space", model.adds_space)
    return _finished(checkpoint, settings, tokenizer, table, adds_space, model.special_ids)


def _read_merged_scores(
    checkpoint: Checkpoint, settings: JsonObject, tokenizer: JsonObject
) -> ScoredVocabulary:
    """Return the vocabulary of a tokenizer.json that is BPE with byte tokens.

    llama.cpp merges by the score of the token that results; a token's score is the rank of its
    first merge, negated, so that the order is the same.
    """
    model = tokenizer.object("model")
    known = model.object("vocab").values
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(read_merges(tokenizer)):
        ranks.setdefault(left + right, rank)
    table = _table(checkpoint, len(known), tokenizer.shown)
    unknown = model.any("unk_token")
    for text, token in known.items():
        kind = UNKNOWN if text == unknown else BYTE if _BYTE_TOKEN.fullmatch(text) else NORMAL
        table.place(text, token, kind, -float(ranks[text]) if text in ranks else 0.0)
    return _finished(checkpoint, settings, tokenizer, table, True, {})


def _finished(
    checkpoint: Checkpoint,
    settings: JsonObject,
    tokenizer: JsonObject,
    table: TokenTable,
    adds_space: bool,
    usual: dict[str, int],
) -> ScoredVocabulary:
    table.add(added_tokens(checkpoint, tokenizer, settings), spaced=True)
    tokens = table.filled()
    missing = {f"<0x{byte:02X}>" for byte in range(256)}.difference(tokens)
    if missing:
        raise UnsupportedModelError(
            f"{table.shown} has no byte token {min(missing)}: llama.cpp cannot read text outside "
            "such a vocabulary"
        )
    return ScoredVocabulary(
        tokens=tokens,
        types=tuple(table.types),
        scores=tuple(table.scores),
        special_ids=special_ids(checkpoint, settings, tokens, usual),
        add_space=_adds_space(tokenizer) if tokenizer.values else adds_space,
        add_bos=_adds_token(tokenizer, settings, "bos", usual=True),
        add_eos=_adds_token(tokenizer, settings, "eos"),
        chat_templates=chat_templates(checkpoint, settings),
    )


def _adds_space(tokenizer: JsonObject) -> bool:
    """Return whether a space is put before texts; refuses other changes of texts."""
    adds, spaces = False, ["Replace", {"String": " "}, SPACE]
    for stage in _stages(tokenizer.any("normalizer"), "normalizers"):
        kind = stage.get("type")
        if kind == "Prepend" and stage.get("prepend") == SPACE:
            adds = True
        elif [kind, stage.get("pattern"), stage.get("content")] != spaces:
            raise tokenizer.unsupported(f"has the unknown normalizer {json.dumps(stage)[:300]}")
    for stage in _stages(tokenizer.any("pre_tokenizer"), "pretokenizers"):
        kind = stage.get("type")
        if kind == "Metaspace" and stage.get("replacement") == SPACE:
            usual = "always" if stage.get("add_prefix_space", True) else "never"
            scheme = stage.get("prepend_scheme", usual)
            adds = adds or scheme != "never"
        elif kind != "Split" or stage.get("pattern") != {"String": " "}:
            raise tokenizer.unsupported(f"has the unknown pre_tokenizer {json.dumps(stage)[:300]}")
    return adds


def _stages(value: Any, inner: str) -> list[dict[str, Any]]:  # noqa: ANN401 - any JSON value
    if not isinstance(value, dict):
        return []
    stages = value.get(inner) if value.get("type") == "Sequence" else [value]
    found = stages if isinstance(stages, list) else []
    return [stage for stage in found if isinstance(stage, dict)]
