"""An index of a growing text: hashed n-grams with links to their earlier occurrences.

As in LZ77's matchers: for a few sizes of n-grams a table holds the latest place of each, and every
place links to the one before it. A lookup takes the longest known size, follows a bounded number of
links and compares tokens, so that it costs the same at any length of text; adding a token costs one
table entry a size.

Realignment after an edit: a text that repeats an earlier one with some tokens changed leaves it at
every change, and the last tokens are then found nowhere, or in many places. Copying goes on where
it was left: behind the source's next occurrence of the last token close by, or, if there is
none, one token further, as if one token had been replaced by one.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

FOUND_AGAIN = 3
"""Tokens of a match from which a place is found by them alone."""

_COPIED = 6  # tokens that must have been copied before an edit
_NEAR = 8  # tokens by which the source may be shorter or longer than its replacement
_PATIENCE = 16  # tokens after which the source is given up

_VISITED = 16  # places looked at for each size
_FORKS_SOUGHT = 4  # tokens back
_FORKS_VISITED = 4


class _Indexed:
    """A text and the tables over it."""

    def __init__(self, n_sizes: int) -> None:
        self.tokens: list[int] = []
        # For each size: hash of an n-gram -> the position after its latest place, and position ->
        # the same of the place before.
        self.latest: list[dict[int, int]] = [{} for _ in range(n_sizes)]
        self.links: list[list[int]] = [[0] for _ in range(n_sizes)]


class NgramIndex:
    """A text's tokens, and the places of n-grams of `min_ngram`, twice that, ... `max_ngram`.

    While it changes it holds nothing, so that Ctrl-C meanwhile forgets everything and never leaves
    half of an entry.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._longest = 2 * max_ngram
        sizes = [min_ngram]
        while sizes[-1] < max_ngram:
            sizes.append(min(2 * sizes[-1], max_ngram))
        self.sizes = tuple(sizes)
        self._indexed = _Indexed(len(self.sizes))

    @property
    def tokens(self) -> list[int]:
        """The text, which only the index changes."""
        return self._indexed.tokens

    def clear(self) -> _Indexed:
        """Forget everything; return it."""
        indexed, self._indexed = self._indexed, _Indexed(len(self.sizes))
        return indexed

    def extend(self, new: Sequence[int]) -> None:
        """Append tokens."""
        if not new:
            return
        indexed = self.clear()
        tokens, start = indexed.tokens, len(indexed.tokens)
        tokens.extend(new)
        for size, latest, links in zip(self.sizes, indexed.latest, indexed.links, strict=True):
            # A place is the position after the n-gram, so 0 can stand for none.
            for end in range(start + 1, len(tokens) + 1):
                if end < size:
                    links.append(0)
                    continue
                key = hash(tuple(tokens[end - size : end]))
                links.append(latest.get(key, 0))
                latest[key] = end
        self._indexed = indexed

    def rewind(self, length: int) -> None:
        """Take back the tokens from position `length` on."""
        indexed = self.clear()
        for size, latest, links in zip(self.sizes, indexed.latest, indexed.links, strict=True):
            # From the end back, or a link would be restored to a place that is gone too.
            for end in range(len(indexed.tokens), max(length, 0), -1):
                before = links.pop()
                if end < size:
                    continue
                key = hash(tuple(indexed.tokens[end - size : end]))
                # Only the latest place of a hash is in the table; links reach those before.
                if latest.get(key) == end:
                    if before:
                        latest[key] = before
                    else:
                        del latest[key]
        del indexed.tokens[max(length, 0) :]
        self._indexed = indexed

    def matches(self, count: int) -> list[tuple[int, int]]:
        """Return up to `count` earlier places most like the text's end: (next position, match).

        Of every size, from the largest down, the latest few places are looked at until there are
        `count`. Longer matches come first, later ones first among equals; lengths are counted
        up to twice the largest size.
        """
        indexed, sizes = self._indexed, self.sizes
        end = len(indexed.tokens)
        found: dict[int, int] = {}
        for level in range(len(sizes) - 1, -1, -1):
            size = sizes[level]
            if size >= end:
                continue
            links = indexed.links[level]
            place = links[end]
            for _ in range(_VISITED):
                if place <= 0:
                    break
                if place not in found:
                    length = self.match_before(place, self._longest)
                    if length >= size:  # else two n-grams with one hash
                        found[place] = length
                place = links[place]
            if len(found) >= count:
                break
        if len(found) <= 1:
            return list(found.items())
        # Only lengths and places decide the order: the same text leads to the same drafts.
        return sorted(found.items(), key=lambda pair: (-pair[1], -pair[0]))[:count]

    def may_match(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens that would follow the text may end as an earlier place of it."""
        indexed, size = self._indexed, self.sizes[0]
        end = [*indexed.tokens[-size:], *tokens]
        return hash(tuple(end[-size:])) in indexed.latest[0]

    def match_before(self, place: int, limit: int) -> int:
        """Return how many tokens before `place` are the text's last ones, at most `limit`."""
        tokens = self.tokens
        end, most = len(tokens), min(place, limit)
        there, here = tokens[place - most : place], tokens[end - most :]
        if there == here:  # as in a text that is quoted at length
            return most
        equal = map(operator.eq, reversed(there), reversed(here))
        return next(length for length, same in enumerate(equal) if not same)

    def since_fork(self, match: int) -> int:
        """Return how many of the `match` last tokens came since the text stood at a fork, or all.

        A fork is a place inside the match, not far back, whose own match had been followed by
        something else before.
        """
        indexed = self._indexed
        tokens, end = indexed.tokens, len(indexed.tokens)
        for back in range(1, min(match, _FORKS_SOUGHT + 1)):
            level = bisect_right(self.sizes, match - back) - 1
            # A shorter n-gram than the smallest indexed size shows nothing about forks.
            if level < 0:
                break
            came = tokens[end - back]
            links = indexed.links[level]
            place = links[end - back]
            for _ in range(_FORKS_VISITED):
                if place <= 0:
                    break
                if tokens[place] != came:
                    return back
                place = links[place]
        return match

    def continuation(self, place: int, length: int) -> list[int]:
        """Return `length` tokens from `place` on; behind the end they begin again."""
        tokens = self.tokens[place : place + length]
        while len(tokens) < length:  # a text that repeats itself: an LZ77 copy that overlaps
            tokens += tokens[: length - len(tokens)]
        return tokens


@dataclass(slots=True)
class Realignment:
    """Remembers which place of an index the text last copied from."""

    place: int = 0
    position: int = 0
    copied: int = 0

    def may_resume(self, position: int) -> bool:
        """Return whether the source may go on at a position of the text."""
        return bool(self.copied) and position - self.position <= _PATIENCE

    def follow(self, place: int, match: int, position: int) -> None:
        """Note that the text's last `match` tokens before `position` stood before `place` too."""
        if match >= _COPIED:
            self.place, self.position, self.copied = place, position, match

    def resume(self, index: NgramIndex) -> tuple[int, int] | None:
        """Return where the source goes on and how many tokens match there; None without one."""
        tokens = index.tokens
        end = len(tokens)
        since = end - self.position
        # With `since` 0 nothing came after the copy: the index's own match is the better one.
        if since <= 0 or not self.may_resume(end):
            return None
        expected = self.place + since
        last = tokens[-1]
        first, beyond = max(1, expected - _NEAR), min(end, expected + _NEAR + 1)
        # Compared by one token first: match_before is Python's loop, and most places fail here.
        near = [place for place in range(first, beyond) if tokens[place - 1] == last]
        if near:
            matches = {place: index.match_before(place, FOUND_AGAIN) for place in near}
            best = min(near, key=lambda place: (-matches[place], abs(place - expected), place))
            return best, matches[best]
        # One token was replaced; after more of them there is no telling.
        return (expected, 0) if since == 1 and expected < end else None
