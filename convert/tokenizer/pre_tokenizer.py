"""llama.cpp's name for the way a byte-level BPE tokenizer splits text before merging.

llama.cpp splits in one of a few built-in ways. Its converter chooses by the vocabulary: the
SHA-256 of the token ids of a probe text, written as Python writes a list. pre_tokenizers.txt has a
name and its hashes a line: llama.cpp's own table, as of the pinned version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from specrun.bindings.errors import (
    MalformedFileError,
    MissingPackageError,
    OptionError,
    UnsupportedModelError,
)
from specrun.convert.checkpoint import JsonObject
from specrun.convert.names import nearest

PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n"
    "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 "
    "\U0001f999\U0001f999 "
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 "
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785"
    "\U0001f601 "
    "?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======= "
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 "
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
"""The text whose tokens are hashed."""

_TABLE = Path(__file__).with_name("pre_tokenizers.txt").read_text(encoding="utf-8").splitlines()
NAMES = frozenset(line.split()[0] for line in _TABLE)
"""Every name that llama.cpp accepts as tokenizer.ggml.pre."""

NAME_BY_HASH = {found: line.split()[0] for line in _TABLE for found in line.split()[1:]}
"""The name for each known hash."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
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
    (("Split", _CONTRACTIONS + _WORDS + r"{1,3}" + _AFTER_NUMBERS), _BYTES): "llama-bpe",
    (("Split", _CONTRACTIONS + _WORDS + _AFTER_NUMBERS), _BYTES): "qwen2",
    (("Split", _CASED % ("", "", "")), _BYTES): "tekken",
    (("Split", _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}")), _BYTES): "gpt-4o",
}


def probe_hash(path: Path) -> str:
    """Return the hash by which llama.cpp recognises the tokenizer.json at `path`.

    Raises MalformedFileError if the file is no tokenizer, MissingPackageError without the package
    tokenizers.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise MissingPackageError("this", "tokenizers", "convert") from error
    try:
        tokens = Tokenizer.from_file(str(path)).encode(PROBE).ids
    except Exception as error:  # the package's errors have no class of its own
        raise MalformedFileError(
            f"{path} is not a tokenizer ({str(error)[:200]}); get it again"
        ) from error
    return sha256(str(tokens).encode()).hexdigest()


def pre_tokenizer_name(tokenizer: JsonObject, path: Path, chosen: str | None = None) -> str:
    """Return llama.cpp's name for the splitting of `tokenizer`, the tokenizer.json at `path`.

    Known vocabularies are recognised by their hash, as llama.cpp does. Beyond that, GPT-2's own
    splitting is taken if the file has exactly that. `chosen` is taken without a look at
    either.

    Raises OptionError if llama.cpp has no `chosen`, UnsupportedModelError if nothing is
    recognised, naming the hash and, if the file's stages are familiar, the name to choose.
    """
    shape = _SHAPES.get(tuple(_stages(tokenizer.any("pre_tokenizer"))))
    if chosen is not None:
        if chosen not in NAMES:
            hint = nearest(chosen, NAMES)
            raise OptionError(f"llama.cpp has no pre-tokenizer {chosen!r}{hint}; gpt-2 is usual")
        _check_normalizer(tokenizer, ("NFC",))
        return chosen
    if shape == "gpt-2":
        _check_normalizer(tokenizer, ())
        return shape
    found = probe_hash(path)
    if found in NAME_BY_HASH:
        return NAME_BY_HASH[found]
    hint = "choose with --pre"
    if shape:
        hint = f"its splitting is that of {shape}: if that is right, choose --pre {shape}"
    raise UnsupportedModelError(
        f"{path} has an unknown pre_tokenizer {_short(tokenizer, 'pre_tokenizer')} "
        f"(hash of the probe text {found}); {hint}"
    )


def _check_normalizer(tokenizer: JsonObject, known: tuple[str, ...]) -> None:
    # llama.cpp composes no characters (NFC); text is almost always composed already.
    normalizer = tokenizer.any("normalizer")
    if normalizer and not (isinstance(normalizer, dict) and normalizer.get("type") in known):
        raise tokenizer.unsupported(f"has the unknown normalizer {_short(tokenizer, 'normalizer')}")


def _stages(pre: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - any JSON value
    """Yield the kind of each stage, and its relevant settings."""
    kind = pre.get("type") if isinstance(pre, dict) else None
    if kind == "Sequence":
        stages = pre.get("pretokenizers")
        for stage in stages if isinstance(stages, list) else []:
            yield from _stages(stage)
    elif kind == "ByteLevel" and not pre.get("add_prefix_space"):
        yield "ByteLevel", "plain" if pre.get("use_regex", True) is False else "regex"
    elif kind == "Digits":
        yield "Digits", "each" if pre.get("individual_digits") else "runs"
    elif kind == "Split" and [type(pre.get("pattern")), pre.get("behavior")] == [dict, "Isolated"]:
        yield "Split", str(pre["pattern"].get("Regex"))
    else:
        yield "unknown", str(kind)


def _short(tokenizer: JsonObject, key: str) -> str:
    text = json.dumps(tokenizer.any(key))
    return text if len(text) <= 400 else text[:400] + "..."
