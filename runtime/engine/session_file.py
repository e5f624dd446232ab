"""Session files: the cache of a long prompt, kept on disk for another run.

A file is llama.cpp's state of the text, followed by a line of JSON with its model and settings, and
by the SHA-256 of all before. A file with another hash, model, version or other settings is never
given to llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from specrun.bindings.contexts.memory import load_sequence, save_sequence, sequence_bytes
from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    OptionError,
    PairError,
    UnsupportedModelError,
)
from specrun.bindings.files import (
    DAMAGE,
    atomic_path,
    json_object,
    open_regular,
    require_free_space,
)
from specrun.runtime.engine.session import Session

MAX_BYTES = 16 << 30
"""The most bytes of a file: the cache of some hundred thousand tokens."""

_VERSION = 1
_MAGIC = b"specrun session\n"
_TAIL = struct.Struct("<Q32s16s")  # the length of the JSON, the hash, and the magic
_MAX_FACTS = 1 << 16
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def save_session(session: Session, path: Path) -> int:
    """Keep the cache of a session's conversation; return how many tokens it holds.

    A file that is there is replaced, whole or not at all. Raises UnsupportedModelError for a
    recurrent model, OptionError for a cache above MAX_BYTES, SpecrunError if the disk is full.
    """
    _require_kept(session)
    target, text = session.target, session.conversation
    target.rewind(text, text.n_cached)  # the rest of an interrupted round goes first
    n_bytes = sequence_bytes(target.context)
    if n_bytes > MAX_BYTES:
        amount = f"{n_bytes / 1e9:.1f} GB for {text.n_cached:,} tokens"
        raise OptionError(f"{path} would take {amount}, above {MAX_BYTES / 1e9:.1f} GB")
    require_free_space(path.parent if path.parent.is_dir() else Path(), n_bytes)
    facts = json.dumps(_facts(session)).encode()
    with atomic_path(path, force=True) as aside:
        save_sequence(target.context, text.tokens[: text.n_cached], aside)
        with aside.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256")
            digest.update(facts)
            file.seek(0, os.SEEK_END)
            file.write(facts + _TAIL.pack(len(facts), digest.digest(), _MAGIC))
    return text.n_cached


def load_session(session: Session, path: Path) -> int:
    """Take a kept cache into a new session; return how many tokens it holds.

    An answer then evaluates only tokens that its prompt does not share with them. A drafter that
    reads the target's states would lack those of a kept prompt: with it nothing is taken, and 0
    returned. Raises MalformedFileError for a damaged file or another version, and PairError for
    another model or other settings, both named.
    """
    _require_kept(session)
    facts = _verified(path)
    for name, ours in _facts(session).items():
        if facts.get(name) != ours:
            advice = "name another file, or remove this one"
            differ = f"its {name} is {facts.get(name)}, this one's {ours}"
            raise PairError(f"{path} was kept for another model or settings: {differ}; {advice}")
    if session.drafter.reads_target:
        return 0
    text = session.conversation
    text.n_cached = 0
    tokens = load_sequence(session.target.context, path)
    text.tokens, text.n_prompt = tokens, len(tokens)
    text.n_cached = len(tokens)
    return len(tokens)


def _require_kept(session: Session) -> None:
    session.require_idle()
    model = session.target.context.model
    if not model.can_branch:
        problem = f"{model.path} is a recurrent or hybrid model ({model.architecture})"
        raise UnsupportedModelError(f"{problem}: a part of its state cannot be taken up again")


def _facts(session: Session) -> dict[str, Any]:
    """Return the facts that must be equal for a cache to be of use."""
    options, model = session.target.context.options, session.target.context.model
    return {
        "version": _VERSION,
        "model": file_digest(model.path),
        "cache types": f"{options.cache_type_k}, {options.cache_type_v}",
        "rope scaling": str(options.rope),
        "adapters": [f"{file_digest(lora.path)}:{lora.scale:g}" for lora in model.loras],
    }


def file_digest(path: Path) -> str:
    """Return a hash of a model's file: its size, its first bytes, and samples of the rest."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(struct.pack("<Q", size))
        for place in range(_SAMPLES):
            file.seek(place * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _verified(path: Path) -> dict[str, Any]:
    """Return the facts in a file, if all of it is as it was written."""
    damaged = f"{path} is no session file, or it is damaged: remove it, or name another"
    try:
        opened = open_regular(path)
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read ({error.strerror})") from error
    with opened as file:
        size = file.seek(0, os.SEEK_END)
        if size < _TAIL.size:
            raise MalformedFileError(damaged)
        file.seek(size - _TAIL.size)
        n_facts, expected, magic = _TAIL.unpack(file.read(_TAIL.size))
        if magic != _MAGIC or n_facts > min(_MAX_FACTS, size - _TAIL.size):
            raise MalformedFileError(damaged)
        digest, left = hashlib.sha256(), size - _TAIL.size
        file.seek(0)
        while left and (chunk := file.read(min(1 << 20, left))):
            digest.update(chunk)
            left -= len(chunk)
        if left or digest.digest() != expected:
            raise MalformedFileError(damaged)
        file.seek(size - _TAIL.size - n_facts)
        try:
            return json_object(file.read(n_facts))
        except DAMAGE:
            raise MalformedFileError(damaged) from None
