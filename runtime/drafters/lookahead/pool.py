"""The n-gram pool of lookahead decoding: kept, stored on disk, and drafted from."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from specrun.bindings.errors import FileMissingError, MalformedFileError, ModelError, OptionError
from specrun.bindings.files import atomic_path, check_target, read_regular
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.drafters.likely_trees import TreeLimits, grow_likely, most_worthwhile
from specrun.runtime.planning import CostCurve, MatchAcceptance
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.trees.growth import TreeBuilder
from specrun.runtime.trees.tree import ROOT

# == The pool ======================================================================================
#
# The pool of lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference
# Using Lookahead Decoding", section 3.2) and the phrase pool of Ouroboros (Zhao et al. 2024,
# section 3.3): n-grams are kept by their first token, so many for each, and the least recently used
# makes room. `NgramStore` gives it a file.


MAX_NGRAM = 64
_MAX_ENTRIES = 1 << 22


class NgramPool:
    """N-grams of 2 to `n` tokens by their first token.

    At most `per_key` are kept for a first token and at most `max_keys` first tokens; of both the
    least recently added (again) is dropped. Adding costs the same however much the pool holds.
    """

    def __init__(self, n: int, *, per_key: int = 16, max_keys: int = 16384) -> None:
        if not 2 <= n <= MAX_NGRAM:
            raise OptionError(f"n-grams of {n} tokens: a pool keeps those of 2 to {MAX_NGRAM}")
        if per_key < 1 or max_keys < 1 or per_key * max_keys > _MAX_ENTRIES:
            raise OptionError(
                f"a pool of {max_keys} first tokens with {per_key} n-grams each: "
                f"give at least 1 of both, and at most {_MAX_ENTRIES} together"
            )
        self.n, self.per_key, self.max_keys = n, per_key, max_keys
        # first token -> the rest of its n-grams; both in the order of their last use, the latest at
        # the end
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rests.values()))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Yield all n-grams such that adding them in this order makes an equal pool."""
        for first, rests in self._rests.items():
            for rest in rests:
                yield (first, *rest)

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or note that it was used again."""
        first, rest = ngram[0], tuple(ngram[1:])
        if not 1 <= len(rest) < self.n:
            raise OptionError(f"an n-gram of {len(ngram)} tokens in a pool for 2 to {self.n}")
        # Taken out and put back: a dict keeps the order of insertion, which is then that of use.
        rests = self._rests.pop(first, None)
        if rests is None:
            rests = {}
            if len(self._rests) >= self.max_keys:
                del self._rests[next(iter(self._rests))]
        self._rests[first] = rests
        # An n-gram that is known moves to the end, and drops none.
        rests.pop(rest, None)
        if len(rests) >= self.per_key:
            del rests[next(iter(rests))]
        rests[rest] = None

    def replace(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Delete the n-grams that begin with `old`, then add `new` (Ouroboros' refinement)."""
        first, beginning = old[0], tuple(old[1:])
        rests = self._rests.get(first, {})
        for rest in [rest for rest in rests if rest[: len(beginning)] == beginning]:
            del rests[rest]
        if not rests:
            self._rests.pop(first, None)
        self.add(new)

    def guesses(self, first: int, limit: int | None = None) -> list[tuple[int, ...]]:
        """Return up to `limit` rests of n-grams after a token, the most recently used first."""
        rests = self._rests.get(first)
        return [] if rests is None else list(islice(reversed(rests), limit))

    def update(self, ngrams: Iterable[Sequence[int]]) -> None:
        """Add many n-grams, such as another pool's; longer ones than this pool keeps are cut."""
        for ngram in ngrams:
            self.add(ngram[: self.n])

    def copy(self) -> NgramPool:
        """Return a pool of the same content and bounds."""
        other = NgramPool(self.n, per_key=self.per_key, max_keys=self.max_keys)
        other._rests = {first: rests.copy() for first, rests in self._rests.items()}
        return other


# == The pool's life: loaded from a file, extended by conversations, saved =========================
#
# The file is little-endian, versioned, bound to a vocabulary, and written whole or not at all:
#
#     magic "SPECNGRM" | version u32 | n u32 | n-grams u64 | tokens u64
#     vocabulary size u32 | vocabulary SHA-256 | lengths u8[n-grams] | tokens i32[tokens]
#     SHA-256 of all before
#
# N-grams stand in the order of their use, so that a pool with smaller bounds keeps the latest.


_MAGIC = b"SPECNGRM"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQI32s")
_DIGEST = 32
_MAX_FILE = 1 << 30


def save_pool(pool: NgramPool, path: str | os.PathLike[str], vocabulary: Vocabulary) -> None:
    """Write a pool over `path`; after a crash at any moment the old file or the new one is there.

    Raises OptionError if the file cannot be written, SpecrunError if the disk is full.
    """
    ngrams = list(pool)
    lengths = np.fromiter(map(len, ngrams), np.uint8, len(ngrams))
    tokens = np.fromiter(chain.from_iterable(ngrams), "<i4", int(lengths.sum(dtype=np.int64)))
    header = _HEADER.pack(
        _MAGIC, _VERSION, pool.n, len(ngrams), len(tokens), vocabulary.size, vocabulary.fingerprint
    )
    content = header + lengths.tobytes() + tokens.tobytes()
    # Written aside and renamed: a crash leaves the old pool or the new one.
    with atomic_path(path, force=True) as aside:
        aside.write_bytes(content + hashlib.sha256(content).digest())


def load_pool(
    path: str | os.PathLike[str],
    vocabulary: Vocabulary,
    *,
    n: int | None = None,
    per_key: int = 16,
    max_keys: int = 16384,
) -> NgramPool:
    """Return the pool of a file within these bounds; a smaller `n` than the file's cuts n-grams.

    Raises FileMissingError, MalformedFileError for a file that is no pool, damaged or of another
    version, and ModelError for a pool of another vocabulary.
    """
    place = Path(path)
    content = _read(place)

    def malformed(problem: str) -> MalformedFileError:
        return MalformedFileError(f"{place} {problem}")

    if content[: len(_MAGIC)] != _MAGIC:
        raise malformed("is not a pool of n-grams; name another file to begin a new pool")
    if len(content) < _HEADER.size + _DIGEST:
        raise malformed(f"is cut off after {len(content)} bytes; delete it to begin a new pool")
    _, version, longest, n_ngrams, n_tokens, size, fingerprint = _HEADER.unpack_from(content)
    if version != _VERSION:
        raise malformed(f"has format version {version}, this specrun reads {_VERSION}; delete it")
    # Sizes are checked before anything is read by them: a damaged header may claim any number.
    expected = _HEADER.size + n_ngrams + 4 * n_tokens + _DIGEST
    if len(content) != expected:
        sizes = f"{len(content)} bytes instead of {expected}"
        raise malformed(f"has {sizes}; delete it to begin anew")
    if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
        raise malformed("is damaged (its checksum is wrong); delete it to begin a new pool")
    if (size, fingerprint) != (vocabulary.size, vocabulary.fingerprint):
        raise ModelError(
            f"{place} was made with another vocabulary ({size} tokens, the target has "
            f"{vocabulary.size}); give each target a pool of its own"
        )
    # Lengths are bytes: as int64 their sum cannot overflow.
    lengths = np.frombuffer(content, np.uint8, n_ngrams, _HEADER.size).astype(np.int64)
    tokens = np.frombuffer(content, "<i4", n_tokens, _HEADER.size + n_ngrams)
    if not _is_sound(lengths, tokens, longest, size):
        raise malformed("contradicts itself; delete it to begin a new pool")
    pool = NgramPool(n or longest, per_key=per_key, max_keys=max_keys)
    stored: list[int] = tokens.tolist()
    ends: list[int] = np.cumsum(lengths).tolist()
    sized = zip(ends, lengths.tolist(), strict=True)
    # Added in the order of use, so that a pool with smaller bounds drops the oldest.
    pool.update(stored[end - length : end] for end, length in sized)
    return pool


def _is_sound(lengths: np.ndarray, tokens: np.ndarray, longest: int, size: int) -> bool:
    if not 2 <= longest <= MAX_NGRAM or int(lengths.sum()) != len(tokens):
        return False
    if len(lengths) and (lengths.min() < 2 or lengths.max() > longest):
        return False
    return not len(tokens) or (tokens.min() >= 0 and bool(tokens.max() < size))


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE:
            problem = "is larger than any pool of n-grams; name another file"
            raise MalformedFileError(f"{path} {problem}")
        return read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileMissingError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise OptionError(f"{path} is a folder; name a file") from None
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read: {error.strerror}") from error


class NgramStore:
    """A pool that can return to how it began, and is saved with all that it ever learned.

    `save` writes a pool somewhere; None keeps nothing. Several conversations may feed one store,
    each adding its own text's n-grams; the drafts of one then depend on the others, the text never
    does.
    """

    def __init__(self, pool: NgramPool, save: Callable[[NgramPool], None] | None = None) -> None:
        self.pool = pool
        self._begun_with = pool.copy()
        self._set_aside: NgramPool | None = None
        self._save = save
        self._is_new = False

    def for_conversation(self) -> NgramStore:
        """Return the store that a new conversation feeds: this one if it is saved, else its own.

        Unsaved n-grams are forgotten with the conversation: its own store begins as this one began.
        """
        return self if self._save is not None else NgramStore(self._begun_with.copy())

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram."""
        self.pool.add(ngram)
        self._is_new = True

    def replace(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Delete n-grams that begin with `old`, and add `new`."""
        self.pool.replace(old, new)
        self._is_new = True

    def add_text(self, tokens: Sequence[int], start: int, size: int) -> list[tuple[int, ...]]:
        """Add the text's n-grams of `size` tokens that end at `start` or later; return them."""
        ends = range(max(start + 1, size), len(tokens) + 1)
        ngrams = [tuple(tokens[end - size : end]) for end in ends]
        for ngram in ngrams:
            self.add(ngram)
        return ngrams

    def forget(self) -> None:
        """Return to how the pool began, for all that feed it; the counts are still saved."""
        if self._save is not None and self._is_new:
            self._set_aside = self._together()
        self.pool = self._begun_with.copy()

    def save(self) -> None:
        """Write new ones, over an earlier file."""
        if self._save is not None and self._is_new:
            self._save(self._together())
            self._is_new = False

    close = save  # the store stays usable

    def _together(self) -> NgramPool:
        if self._set_aside is None:
            return self.pool.copy()
        together = self._set_aside.copy()
        together.update(self.pool)
        return together


def open_store(
    path: Path | None,
    vocabulary: Vocabulary,
    *,
    n: int,
    per_key: int,
    max_keys: int,
    keep: bool = True,
) -> NgramStore:
    """Return the store of a file, which need not exist yet; None for one that lives in memory only.

    `keep` False reads the file and never writes it. Raises the errors of `load_pool`, and at once
    those that writing would raise for a missing folder.
    """
    if path is None:
        return NgramStore(NgramPool(n, per_key=per_key, max_keys=max_keys))
    if path.exists() or not keep:
        pool = load_pool(path, vocabulary, n=n, per_key=per_key, max_keys=max_keys)
    else:
        pool = NgramPool(n, per_key=per_key, max_keys=max_keys)
    if not keep:
        return NgramStore(pool)
    check_target(path, force=True)
    return NgramStore(pool, lambda latest: save_pool(latest, path, vocabulary))


# == The verification branch: n-grams of the pool, drafted as point masses =========================
#
# `LatestGuesses` is the paper's (Fu et al. 2024, section 3.2): the G n-grams of the root's token
# that were used last, and as many nodes. `PlannedGuesses` drafts guesses that should pay: it grows
# a tree of the pool's continuations where they are likely, and keeps as much of it as yields the
# most tokens for the cost of evaluating it.
#
# How likely they are, `MatchAcceptance` learns by the number of matched tokens and the rank.


# First estimates: by the number of matched tokens, and the share of that for the second, third, ...
# continuation.
_BY_MATCH = (0.1, 0.25, 0.35, 0.4, 0.45, 0.65, 0.8)
_BY_RANK = (1.0, 0.3, 0.15, 0.1)
GUESS_PRIORS = [[match * rank for rank in _BY_RANK] for match in _BY_MATCH]
"""By kind (`kind_of`) and rank."""


def kind_of(matched: int) -> int:
    """Return the kind of a match of 1 or more tokens."""
    return min(matched, len(_BY_MATCH)) - 1


# A draft's expected gain must exceed Python's time for it, and estimates are not exact.
_WORTH = 1.08
_UNLIKELY = 0.02


def add_phrases(
    builder: TreeBuilder,
    phrases: Iterable[Sequence[int]],
    max_depth: int,
    max_nodes: int,
    end_tokens: frozenset[int] = frozenset(),
) -> None:
    """Add phrases below the root as point masses; those that begin alike share their nodes."""
    # Nodes of other branches in the builder are not counted, as room is for these alone.
    limit = len(builder) + max_nodes
    known: dict[tuple[int, int], int] = {}
    for phrase in phrases:
        parent = ROOT
        for token in phrase[: max(0, max_depth)]:
            node = known.get((parent, token))
            if node is None:
                if len(builder) >= limit:
                    break
                node = known[parent, token] = builder.add(parent, token)
            parent = node
            if token in end_tokens:
                break


class LatestGuesses:
    """At most `limit` n-grams that begin with the root's token, the most recently used first."""

    def __init__(self, limit: int, ngram: int) -> None:
        self.max_leaves = limit
        self.max_nodes = limit * (ngram - 1)

    def add_to(
        self, tree: TreeBuilder, pool: NgramPool, request: DraftRequest, room: int, beside: int
    ) -> None:
        """Add up to `room`; those that begin alike share their nodes."""
        guesses = pool.guesses(request.tokens[-1], self.max_leaves)
        room = min(room, self.max_nodes)
        add_phrases(tree, guesses, request.max_depth, room, request.end_tokens)

    def learn(self, pool: NgramPool, tokens: Sequence[int], start: int) -> None:
        """Nothing to learn: every guess is drafted."""

    def forget(self) -> None:
        """Nothing was learned."""


class PlannedGuesses:
    """A tree of at most `max_leaves` paths and `max_nodes` nodes, cut where it pays best.

    A node's probability is its parent's times the measured acceptance of such a continuation
    (`MatchAcceptance`). Nodes are taken from the most probable down, and as many as yield the most
    tokens a second on this cost curve (`likely_trees`).
    """

    def __init__(
        self, curve: CostCurve, *, max_leaves: int = 4, max_nodes: int = 12, depth: int = 8
    ) -> None:
        self.max_leaves = max_leaves
        self.max_nodes = max_nodes if max_leaves else 0
        self._depth, self._curve = depth, curve
        self._acceptance = MatchAcceptance(GUESS_PRIORS)

    def add_to(
        self, tree: TreeBuilder, pool: NgramPool, request: DraftRequest, room: int, beside: int
    ) -> None:
        """Add the tree that should pay best beside so many other nodes, if any does."""
        # n - 1 tokens are the longest beginning of an n-gram that leaves one token to guess.
        tail = tuple(request.tokens[1 - pool.n :])

        def below(path: tuple[int, ...]) -> Iterator[tuple[int, float, tuple[int, ...]]]:
            found = continuations(pool, (tail + path)[1 - pool.n :], len(_BY_RANK))
            for rank, (token, matched) in enumerate(found):
                yield token, self._acceptance.chance(kind_of(matched), rank), (*path, token)

        most, depth = min(room, self.max_nodes), min(request.max_depth, self._depth)
        limits = TreeLimits(most, depth, self.max_leaves, request.end_tokens)
        root: tuple[int, ...] = ()
        likely = grow_likely(root, below, limits, _UNLIKELY)
        chances = [guess.probability for guess in likely]
        count, _ = most_worthwhile(chances, self._curve, _WORTH, beside)
        nodes = {ROOT: ROOT}
        for number, guess in enumerate(likely[:count]):
            nodes[number] = tree.add(nodes[guess.parent], guess.token)

    def learn(self, pool: NgramPool, tokens: Sequence[int], start: int) -> None:
        """Count for every token from `start` on which of the pool's continuations it was."""
        for end in range(max(start, 1), len(tokens)):
            # Drafted or not: a point mass would have been accepted exactly if it is the next token.
            tail = tokens[max(0, end - pool.n + 1) : end]
            found = continuations(pool, tail, len(_BY_RANK))
            if found:
                named = [token for token, _ in found]
                rank = named.index(tokens[end]) if tokens[end] in named else None
                self._acceptance.learn([kind_of(matched) for _, matched in found], rank)

    def forget(self) -> None:
        """Return to the first estimates."""
        self._acceptance.forget()


Guesses = LatestGuesses | PlannedGuesses
"""Drafts from a pool, and learns from the text how far to trust it."""


def continuations(pool: NgramPool, tail: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Return tokens that followed this tail in the pool, each with the length of its match.

    The longest match comes first, of equal ones the most recently used; a token is named once.
    """
    found: dict[int, int] = {}
    # Longer matches first, so that setdefault keeps the best evidence of a token.
    for matched in range(min(len(tail), pool.n - 1), 0, -1):
        before = tuple(tail[len(tail) - matched + 1 :])
        for rest in pool.guesses(tail[-matched]):
            if len(rest) < matched or rest[: matched - 1] != before:
                continue
            found.setdefault(rest[matched - 1], matched)
            if len(found) >= limit:
                return list(found.items())
    return list(found.items())
