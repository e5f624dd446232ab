"""The n-gram pool of lookahead decoding and Ouroboros: what may follow a token, the latest first.

The pool of lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference
Using Lookahead Decoding", section 3.2) and the phrase pool of Ouroboros (Zhao et al. 2024, section
3.3): n-grams are kept by their first token, so many for each, and the least recently used makes
room. `pool_store.py` gives it a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from specrun.bindings.errors import OptionError

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NgramPool) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # a pool changes

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
