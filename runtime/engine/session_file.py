"""Session files: the cache of a long prompt, kept on disk for another run.

A file is llama.cpp's state of the text, followed by the checkpoints of a recurrent state, by a line
of JSON with its model and settings, and by the SHA-256 of all before. A file with another hash,
model, version or other settings is never given to llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.memory import load_sequence, save_sequence, sequence_bytes
from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    OptionError,
    PairError,
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
_STATES = "checkpoints"  # their numbers of tokens and of bytes
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def save_session(session: Session, path: Path) -> int:
    """Keep the cache of a session's conversation; return how many tokens it holds.

    A file that is there is replaced, whole or not at all. Raises OptionError for a cache above
    MAX_BYTES, SpecrunError if the disk is full.
    """
    session.require_idle()
    target, text = session.target, session.conversation
    target.rewind(text, text.n_cached)  # the rest of an interrupted round goes first
    checkpoints = target.context.memory.checkpoints
    states = [] if checkpoints is None else checkpoints.copies()
    sizes = [(n_tokens, len(data)) for n_tokens, data in states]
    n_bytes = sequence_bytes(target.context) + sum(size for _, size in sizes)
    if n_bytes > MAX_BYTES:
        amount = f"{n_bytes / 1e9:.1f} GB for {text.n_cached:,} tokens"
        raise OptionError(f"{path} would take {amount}, above {MAX_BYTES / 1e9:.1f} GB")
    require_free_space(path.parent if path.parent.is_dir() else Path(), n_bytes)
    facts = json.dumps({**_facts(session), _STATES: sizes}).encode()
    with atomic_path(path, force=True) as aside:
        save_sequence(target.context, text.tokens[: text.n_cached], aside)
        with aside.open("rb+") as file:
            file.seek(0, os.SEEK_END)
            for _, data in states:
                file.write(data.tobytes())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256")
            digest.update(facts)
            file.write(facts + _TAIL.pack(len(facts), digest.digest(), _MAGIC))
    return text.n_cached


def load_session(session: Session, path: Path) -> int:
    """Take a kept cache into a new session; return how many tokens it holds.

    An answer then evaluates only tokens that its prompt does not share with them. A drafter that
    reads the target's states would lack those of a kept prompt: with it nothing is taken, and 0
    returned. Raises MalformedFileError for a damaged file or another version, and PairError for
    another model or other settings, both named.
    """
    session.require_idle()
    facts, end = _verified(path)
    for name, ours in _facts(session).items():
        if facts.get(name) != ours:
            advice = "name another file, or remove this one"
            differ = f"its {name} is {facts.get(name)}, this one's {ours}"
            raise PairError(f"{path} was kept for another model or settings: {differ}; {advice}")
    if session.drafter.reads_target:
        return 0
    text, context = session.conversation, session.target.context
    text.n_cached = 0
    tokens = load_sequence(context, path)
    if context.memory.checkpoints is not None:
        for n_tokens, data in _states(path, facts, end, len(tokens)):
            context.memory.checkpoints.add(0, n_tokens, data)
    text.tokens, text.n_prompt = tokens, len(tokens)
    text.n_cached = len(tokens)
    return len(tokens)


def _states(
    path: Path, facts: dict[str, Any], end: int, n_tokens: int
) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Return the checkpoints of a file, which lie before place `end`, by their numbers of tokens.

    Raises MalformedFileError if they cannot be part of a text of so many tokens.
    """
    sizes = facts.get(_STATES)
    pairs: list[Any] = sizes if isinstance(sizes, list) else [None]
    is_whole = all(
        isinstance(pair, list) and len(pair) == 2 and all(type(each) is int for each in pair)
        for pair in pairs
    )
    if not is_whole or not all(0 < n <= n_tokens and size > 0 for n, size in pairs):
        raise MalformedFileError(_damaged(path))
    start = end - sum(size for _, size in pairs)
    if start < 0:
        raise MalformedFileError(_damaged(path))
    with open_regular(path) as file:
        file.seek(start)
        return [(n, np.frombuffer(file.read(size), np.uint8)) for n, size in pairs]


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


def _damaged(path: Path) -> str:
    return f"{path} is no session file, or it is damaged: remove it, or name another"


def _verified(path: Path) -> tuple[dict[str, Any], int]:
    """Return the facts in a file, and where they begin, if all of it is as it was written."""
    damaged = _damaged(path)
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
            return json_object(file.read(n_facts)), size - _TAIL.size - n_facts
        except DAMAGE:
            raise MalformedFileError(damaged) from None
