"""The store of answered texts: earlier answers are found again in other conversations.

Suffix decoding (Oliaro et al. 2024) keeps a suffix tree of earlier outputs and drafts the most
frequent continuation of the text's longest suffix. Here the same is looked up in a suffix array
(`ContextIndex`), and the tree is grown by counts as in REST. The store is a datastore of its
vocabulary in a file that only its owner can read. It is bounded: the oldest texts go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrun.bindings.errors import FileMissingError, MalformedFileError, SpecrunError
from specrun.bindings.files import logger, state_folder
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.retrieval.datastore import (
    DEPTH,
    ContextIndex,
    StoreHeader,
    open_store,
    read_store_header,
    store_tokens,
)
from specrun.runtime.online import KEEP, LearnFrom, put_aside

MOST_TOKENS = 1 << 20
"""Tokens of a store at most; a file has about 8 bytes for each."""

_SUFFIX = ".store"
_LEAST = 2  # tokens of a text: one is followed by another
_GROWTH = 16  # an index is made anew if a part so large of it is not found yet


class AnswerStore:
    """Answered texts of one vocabulary: those of a file, and those of this process so far."""

    def __init__(self, target: Model, path: Path | None = None, most: int = MOST_TOKENS) -> None:
        self._vocabulary, self._model = target.vocabulary, target.path.name
        self.path, self._most = path, most
        self._kept: ContextIndex | None = None
        self._new: list[list[int]] = []
        self._unsaved: list[list[int]] = []
        self._index: ContextIndex | None = None  # of the first of the new ones
        self._indexed = self._pending = 0  # tokens
        if path is not None and path.exists():
            self._kept = open_store(path, self._vocabulary).copied()

    def add(self, tokens: Sequence[int], n_prompt: int) -> None:
        """Take an answer, with so much of its prompt as tells it from others."""
        text = [*tokens[max(0, n_prompt - DEPTH) :]][: self._most]
        if len(tokens) <= n_prompt or len(text) < _LEAST:
            return
        self._new.append(text)
        self._unsaved.append(text)
        self._pending += len(text)
        # Tokens added since are not found yet: it is little, and an index takes a sort.
        if self._pending * _GROWTH >= self._indexed:
            self._new, self._unsaved = (newest(t, self._most) for t in (self._new, self._unsaved))
            self._index = ContextIndex.of_texts(self._new, self._vocabulary.size)
            self._indexed, self._pending = sum(map(len, self._new)), 0

    def nearest(
        self, context: Sequence[int], count: int, length: int, min_match: int
    ) -> list[tuple[int, list[int]]]:
        """Return the places of the longest matches (`ContextIndex.nearest`)."""
        found: list[tuple[int, list[int]]] = []
        for index in (self._index, self._kept):
            if index is not None:
                found += index.nearest(context, count, length, min_match)
        return sorted(found, key=lambda place: -place[0])[:count]

    def __len__(self) -> int:
        return len(self._new) + (0 if self._kept is None else len(self._kept.texts()))

    def save(self) -> None:
        """Add new tokens to the file, as it is now: another process may have written it since.

        Raises SpecrunError if it cannot be written; the file then stays as it was.
        """
        if self.path is None or not self._unsaved:
            return
        kept = open_store(self.path, self._vocabulary).texts() if self.path.exists() else []
        texts = newest([*kept, *self._unsaved], self._most)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        store_tokens(texts, self._vocabulary, self.path, model=self._model)
        self._unsaved = []

    close = save  # it stays usable


def newest(texts: Sequence[list[int]], most: int) -> list[list[int]]:
    """Return the last texts that have at most so many tokens together, their ends included."""
    n_tokens = 0
    for number, text in enumerate(reversed(texts)):
        n_tokens += len(text) + 1
        if n_tokens > most:
            return [*texts[len(texts) - number :]]
    return [*texts]


def open_answers(keep: LearnFrom, target: Model) -> AnswerStore | None:
    """Return the store that `keep` names, None without one.

    A damaged file in the user's state folder is put aside, with a warning in the log. Raises
    `PairError` for a store of another vocabulary, and as `open_store` for other files.
    """
    if keep is False:
        return None
    if keep is True:
        return AnswerStore(target)
    if keep != KEEP:
        return AnswerStore(target, Path(keep).expanduser())
    path = answers_file(target)
    try:
        return AnswerStore(target, path)
    except MalformedFileError as problem:
        ignored = "the kept answers were ignored"
        logger.warning("%s: %s; they are now %s", ignored, problem, put_aside(path))
    return AnswerStore(target, path)


def answers_file(target: Model) -> Path:
    """Return the file of a target's vocabulary: models with the same one share their answers."""
    return _folder() / f"{target.vocabulary.fingerprint.hex()[:16]}{_SUFFIX}"


def kept_answers() -> list[tuple[Path, StoreHeader | SpecrunError]]:
    """Return the stores in the user's state folder, each with its header or its error."""
    found: list[tuple[Path, StoreHeader | SpecrunError]] = []
    for path in sorted(_folder().glob(f"*{_SUFFIX}")) if _folder().is_dir() else []:
        try:
            found.append((path, read_store_header(path)))
        except (MalformedFileError, FileMissingError) as problem:
            found.append((path, problem))
    return found


def _folder() -> Path:
    return state_folder() / "answers"
