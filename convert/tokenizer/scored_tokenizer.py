"""Vocabularies of SentencePiece's kind, from tokenizer.model or from a tokenizer.json that was made
of one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.tokenizer.sentencepiece_model import read_sentencepiece
from specrun.convert.tokenizer.special_tokens import adds_token, chat_template, special_ids
from specrun.convert.tokenizer.token_table import TokenTable, added_tokens, read_merges
from specrun.convert.tokenizer.vocabulary import BYTE, NORMAL, UNKNOWN, ScoredVocabulary

_BPE = 2
_ALGORITHMS = {1: "unigram", 3: "word", 4: "char"}
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "▁"


def read_scores(
    checkpoint: Checkpoint, settings: JsonObject, tokenizer: JsonObject, path: Path
) -> ScoredVocabulary:
    """Return the vocabulary of the tokenizer.model at `path`; `tokenizer` may be an empty object.

    Raises UnsupportedModelError for a model that is not BPE, or rewrites text in ways llama.cpp
    does not.
    """
    model = read_sentencepiece(path)
    if model.algorithm != _BPE:
        kind = _ALGORITHMS.get(model.algorithm, str(model.algorithm))
        raise UnsupportedModelError(
            f"{path} is a {kind} model: llama.cpp would split text otherwise, only BPE is known"
        )
    if model.has_character_map and not tokenizer.values:
        raise UnsupportedModelError(
            f"{path} rewrites characters before splitting (NFKC), which llama.cpp does not"
        )
    table = TokenTable(_size(checkpoint, len(model.pieces), str(path)), str(path))
    for token, piece in enumerate(model.pieces[: len(table.tokens)]):
        table.place(piece.text, token, piece.kind, piece.score)
    adds_space = settings.flag("add_prefix_space", model.adds_space)
    return _finished(checkpoint, settings, tokenizer, table, adds_space, model.special_ids)


def read_merged_scores(
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
    table = TokenTable(_size(checkpoint, len(known), tokenizer.shown), tokenizer.shown)
    unknown = model.any("unk_token")
    for text, token in known.items():
        kind = UNKNOWN if text == unknown else BYTE if _BYTE_TOKEN.fullmatch(text) else NORMAL
        table.place(text, token, kind, -float(ranks[text]) if text in ranks else 0.0)
    return _finished(checkpoint, settings, tokenizer, table, True, {})


def _size(checkpoint: Checkpoint, known: int, shown: str) -> int:
    size = checkpoint.config.count("vocab_size")
    if size > known + (1 << 20):
        raise MalformedFileError(f"the config states {size} tokens, and {shown} has {known}")
    return size


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
        add_bos=adds_token(tokenizer, settings, "bos", usual=True),
        add_eos=adds_token(tokenizer, settings, "eos"),
        chat_template=chat_template(checkpoint, settings),
    )


def _adds_space(tokenizer: JsonObject) -> bool:
    """Return whether a space is put before texts; refuses other changes of texts."""
    adds = False
    for stage in _stages(tokenizer.any("normalizer"), "normalizers"):
        kind = stage.get("type")
        if kind == "Prepend" and stage.get("prepend") == _SPACE:
            adds = True
        elif (
            kind != "Replace"
            or stage.get("pattern") != {"String": " "}
            or stage.get("content") != _SPACE
        ):
            raise UnsupportedModelError(
                f"{tokenizer.shown} has the unknown normalizer {json.dumps(stage)[:300]}"
            )
    for stage in _stages(tokenizer.any("pre_tokenizer"), "pretokenizers"):
        kind = stage.get("type")
        if kind == "Metaspace" and stage.get("replacement") == _SPACE:
            scheme = stage.get(
                "prepend_scheme", "always" if stage.get("add_prefix_space", True) else "never"
            )
            adds = adds or scheme != "never"
        elif kind != "Split" or stage.get("pattern") != {"String": " "}:
            raise UnsupportedModelError(
                f"{tokenizer.shown} has the unknown pre_tokenizer {json.dumps(stage)[:300]}"
            )
    return adds


def _stages(value: Any, inner: str) -> list[dict[str, Any]]:  # noqa: ANN401 - any JSON value
    if not isinstance(value, dict):
        return []
    stages = value.get(inner) if value.get("type") == "Sequence" else [value]
    return (
        [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    )
