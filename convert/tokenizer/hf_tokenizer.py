"""Reads a checkpoint's tokenizer into a vocabulary for GGUF: which kind it is, and its tokens."""

from __future__ import annotations

from pathlib import Path

from specrun.bindings.errors import MalformedFileError, OptionError, UnsupportedModelError
from specrun.convert.checkpoint import Checkpoint, JsonObject, read_json_object
from specrun.convert.tokenizer.pre_tokenizer import pre_tokenizer_name
from specrun.convert.tokenizer.scored_tokenizer import read_merged_scores, read_scores
from specrun.convert.tokenizer.special_tokens import adds_token, chat_template, special_ids
from specrun.convert.tokenizer.token_table import TokenTable, added_tokens, read_merges
from specrun.convert.tokenizer.vocabulary import BytePairVocabulary, Vocabulary


def read_vocabulary(checkpoint: Checkpoint, *, pre: str | None = None) -> Vocabulary:
    """Return the vocabulary of a checkpoint, filled up to the size its config states.

    tokenizer.json may be byte-level BPE, or BPE with byte tokens (SentencePiece's kind), for which
    the scores of tokenizer.model are preferred; tokenizer.model alone does too. `pre` is
    llama.cpp's name of the way a byte-level tokenizer splits text, where that is not to be found
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
        return read_scores(
            checkpoint, settings, JsonObject({}, str(folder / "tokenizer.json")), model_file
        )
    tokenizer = read_json_object(folder / "tokenizer.json")
    model = tokenizer.object("model")
    if model.text("type", "BPE") != "BPE" or "vocab" not in model:
        raise UnsupportedModelError(
            f"{tokenizer.shown} is a {model.any('type')} tokenizer: only BPE is known"
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.any(key):
            raise UnsupportedModelError(
                f"{tokenizer.shown} has {key} = {model.any(key)!r}, which is not known here"
            )
    if not model.flag("byte_fallback", False):
        return _byte_level(checkpoint, settings, tokenizer, pre)
    _refuse_pre(pre, folder / "tokenizer.json")
    if model_file.exists():
        return read_scores(checkpoint, settings, tokenizer, model_file)
    return read_merged_scores(checkpoint, settings, tokenizer)


def _refuse_pre(pre: str | None, path: Path) -> None:
    if pre is not None:
        raise OptionError(f"{path} is no byte-level tokenizer: leave the pre-tokenizer ({pre}) out")


def _byte_level(
    checkpoint: Checkpoint, settings: JsonObject, tokenizer: JsonObject, pre: str | None
) -> BytePairVocabulary:
    name = pre_tokenizer_name(tokenizer, checkpoint.folder / "tokenizer.json", pre)
    size = checkpoint.config.count("vocab_size")
    known = tokenizer.object("model").object("vocab").values
    added = list(added_tokens(checkpoint, tokenizer, settings))
    if size > len(known) + len(added) + (1 << 20):
        raise MalformedFileError(
            f"the config states {size} tokens, and {tokenizer.shown} has {len(known) + len(added)}"
        )
    table = TokenTable(size, tokenizer.shown)
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
        add_bos=adds_token(tokenizer, settings, "bos"),
        add_eos=settings.flag("add_eos_token") if "add_eos_token" in settings else None,
        chat_template=chat_template(checkpoint, settings),
    )
