"""Finds llama.cpp's name for the way a byte-level BPE tokenizer splits text before merging."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from specrun.bindings.errors import MalformedFileError, MissingPackageError, OptionError, UnsupportedModelError
from specrun.convert.json_file import JsonObject
from specrun.convert.names import nearest
from specrun.convert.pre_tokenizer_names import NAME_BY_HASH, NAMES, PROBE

__all__ = ["pre_tokenizer_name", "probe_hash"]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = ("ByteLevel", "plain")
# The stages of tokenizer.json's pre_tokenizer, for the splittings that most models have.
_SHAPES: dict[tuple[tuple[str, str], ...], str] = {
    (("ByteLevel", "regex"),): "gpt-2",
    (("Digits", "each"), ("ByteLevel", "regex")): "smollm",
    (("Split", _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_NUMBERS), _BYTES): "llama-bpe",
    (("Split", _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_NUMBERS), _BYTES): "qwen2",
    (("Split", _CASED % ("", "", "")), _BYTES): "tekken",
    (("Split", _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}")), _BYTES): "gpt-4o",
}


def probe_hash(path: Path) -> str:
    """Return the hash by which llama.cpp knows the tokenizer.json at `path`.

    Raises MalformedFileError if the file is no tokenizer, MissingPackageError without the package tokenizers.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise MissingPackageError("this", "tokenizers", "convert") from error
    try:
        tokens = Tokenizer.from_file(str(path)).encode(PROBE).ids
    except Exception as error:  # what the package raises has no class of its own
        raise MalformedFileError(f"{path} is not a tokenizer ({str(error)[:200]}); get it again") from error
    return sha256(str(tokens).encode()).hexdigest()


def pre_tokenizer_name(tokenizer: JsonObject, path: Path, chosen: str | None = None) -> str:
    """Return llama.cpp's name for the splitting of the tokenizer.json at `path`, which holds `tokenizer`.

    Known vocabularies are recognised by their hash, as llama.cpp does. Beyond that, GPT-2's own splitting is
    taken where the file states exactly that. `chosen` is taken without a look at either.

    Raises OptionError if llama.cpp does not know `chosen`, UnsupportedModelError if nothing is recognised,
    naming the hash and, where the file's stages are familiar, the name to choose.
    """
    shape = _SHAPES.get(tuple(_stages(tokenizer.any("pre_tokenizer"))))
    if chosen is not None:
        if chosen not in NAMES:
            hint = nearest(chosen, NAMES)
            raise OptionError(f"llama.cpp has no pre-tokenizer {chosen!r}{hint}; gpt-2, llama-bpe and qwen2 are usual")
        _check_normalizer(tokenizer, ("NFC",))
        return chosen
    if shape == "gpt-2":
        _check_normalizer(tokenizer, ())
        return shape
    found = probe_hash(path)
    if found in NAME_BY_HASH:
        return NAME_BY_HASH[found]
    hint = f"its splitting is that of {shape}: if that is right, choose --pre {shape}" if shape else "choose with --pre"
    raise UnsupportedModelError(
        f"{path} has an unknown pre_tokenizer {_short(tokenizer, 'pre_tokenizer')} "
        f"(hash of the probe text {found}); {hint}"
    )


def _check_normalizer(tokenizer: JsonObject, known: tuple[str, ...]) -> None:
    # llama.cpp composes no characters (NFC); text is almost always composed already.
    normalizer = tokenizer.any("normalizer")
    if normalizer and not (isinstance(normalizer, dict) and normalizer.get("type") in known):
        raise UnsupportedModelError(f"{tokenizer.shown} has the unknown normalizer {_short(tokenizer, 'normalizer')}")


def _stages(pre: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - any JSON value
    """Yield the kind of each stage, and what matters of it."""
    kind = pre.get("type") if isinstance(pre, dict) else None
    if kind == "Sequence":
        stages = pre.get("pretokenizers")
        for stage in stages if isinstance(stages, list) else []:
            yield from _stages(stage)
    elif kind == "ByteLevel" and not pre.get("add_prefix_space"):
        yield "ByteLevel", "plain" if pre.get("use_regex", True) is False else "regex"
    elif kind == "Digits":
        yield "Digits", "each" if pre.get("individual_digits") else "runs"
    elif kind == "Split" and isinstance(pre.get("pattern"), dict) and pre.get("behavior") == "Isolated":
        yield "Split", str(pre["pattern"].get("Regex"))
    else:
        yield "unknown", str(kind)


def _short(tokenizer: JsonObject, key: str) -> str:
    text = json.dumps(tokenizer.any(key))
    return text if len(text) <= 400 else text[:400] + "..."
