"""A pool of n-grams over its life: loaded, learned into by conversations, set back for a measurement, saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from specrun.runtime.atomic import check_target
from specrun.runtime.drafters.ngram_file import Words, load_pool, save_pool
from specrun.runtime.drafters.ngram_pool import NgramPool

__all__ = ["NgramStore", "open_store"]


class NgramStore:
    """A pool that can return to how it began, and is saved with all that it ever learned.

    `save` writes a pool somewhere; None keeps nothing. Several conversations may feed one store, each adding what
    its own text says; what is drafted in one of them then depends on the others, the text never does.
    """

    def __init__(self, pool: NgramPool, save: Callable[[NgramPool], None] | None = None) -> None:
        self.pool = pool
        self._begun_with = pool.copy()
        self._set_aside: NgramPool | None = None
        self._save = save
        self._is_new = False

    def for_conversation(self) -> NgramStore:
        """Return the store that a new conversation feeds: this one where it is saved, else one of its own.

        What nobody saves is forgotten with the conversation: its own store begins with what this one began with.
        """
        return self if self._save is not None else NgramStore(self._begun_with.copy())

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram."""
        self.pool.add(ngram)
        self._is_new = True

    def add_text(self, tokens: Sequence[int], start: int, size: int) -> list[tuple[int, ...]]:
        """Add every n-gram of `size` tokens of a text that ends at position `start` or later; return them in order."""
        ngrams = [tuple(tokens[end - size : end]) for end in range(max(start + 1, size), len(tokens) + 1)]
        for ngram in ngrams:
            self.add(ngram)
        return ngrams

    def forget(self) -> None:
        """Return to how the pool began, for all that feed it; what was learned since is still saved."""
        if self._save is not None and self._is_new:
            self._set_aside = self._together()
        self.pool = self._begun_with.copy()

    def save(self) -> None:
        """Write what is new, over an earlier file."""
        if self._save is not None and self._is_new:
            self._save(self._together())
            self._is_new = False

    def close(self) -> None:
        """Save; the store stays usable."""
        self.save()

    def _together(self) -> NgramPool:
        if self._set_aside is None:
            return self.pool.copy()
        together = self._set_aside.copy()
        together.update(self.pool)
        return together


def open_store(
    path: Path | None, words: Words, *, n: int, per_key: int, max_keys: int, keep: bool = True
) -> NgramStore:
    """Return the store of a file, which need not exist yet; None for one that lives in memory only.

    `keep` False reads the file and never writes it. Raises the errors of `load_pool`, and at once those that writing
    would raise for a missing folder.
    """
    if path is None:
        return NgramStore(NgramPool(n, per_key=per_key, max_keys=max_keys))
    if path.exists() or not keep:
        pool = load_pool(path, words, n=n, per_key=per_key, max_keys=max_keys)
    else:
        pool = NgramPool(n, per_key=per_key, max_keys=max_keys)
    if not keep:
        return NgramStore(pool)
    check_target(path, force=True)
    return NgramStore(pool, lambda latest: save_pool(latest, path, words))
