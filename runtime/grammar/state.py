"""Places of a text under a grammar: what may follow each of them (llguidance's token masks).

A place is known by the tokens that lead to it, and says what may come next whoever asks and in
whatever order: nobody advances a grammar, so nobody can leave it advanced by a branch of a draft
tree that was rejected. Behind that, one matcher moves to and fro between places: `Cursor` takes
back what it has consumed down to where two texts part, and consumes the other's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from specrun.runtime.grammar.grammar import Grammar, GrammarError

Mask = npt.NDArray[np.bool_]
_Row = TypeVar("_Row", bound=npt.NDArray[np.floating])


class Matcher(Protocol):
    """llguidance's `LLMatcher`, as far as it is used."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consume tokens up to the first that is forbidden; return how many."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """Return how many of these tokens could be consumed."""

    def rollback(self, num_tokens: int) -> bool:
        """Take back the last tokens."""

    def compute_bitmask(self) -> bytes:
        """Return a bit for every token, lowest first: may it come next?"""

    def compute_ff_bytes(self) -> bytes:
        """Return the text that the grammar forces."""

    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    def is_stopped(self) -> bool:
        """Whether the text has to end here."""

    def is_error(self) -> bool:
        """Whether it gave up."""

    def get_error(self) -> str:
        """Return why."""


class Lexicon(Protocol):
    """What is known of the vocabulary: see `compile.GrammarCompiler`."""

    size: int
    end_tokens: frozenset[int]

    def spelling(self, token: int) -> bytes:
        """Return a token's bytes; control tokens are shown by name."""

    def tokens_of(self, text: bytes) -> tuple[int, ...] | None:
        """Return tokens that spell these bytes; None where there are none."""

    def unambiguous_tokens_of(self, text: bytes) -> list[int]:
        """Return tokens that spell these bytes, but for an end that may depend on what follows."""

    def completing(self, tail: bytes, marker: bytes) -> Iterable[tuple[int, bytes]]:
        """Return the tokens that complete a marker after a tail and go on, and with what."""


class Cursor:
    """One matcher, which stands at one place; `at` moves it to another."""

    def __init__(self, matcher: Matcher, grammar: Grammar, lexicon: Lexicon) -> None:
        self.grammar, self.lexicon = grammar, lexicon
        self.marker = grammar.after.encode()
        self._matcher = matcher
        self._here: GrammarState | None = None

    def at(self, place: GrammarState) -> Matcher:
        """Return the matcher at a place, to be asked and not to be moved."""
        here, taken_back = self._here, 0
        if here is place:
            return self._matcher
        wanted: list[GrammarState] = []
        ahead: GrammarState | None = place
        while here is not ahead:
            if here is not None and (ahead is None or here.length >= ahead.length):
                taken_back += len(here.fed)
                here = here.parent
            elif ahead is not None:
                wanted.append(ahead)
                ahead = ahead.parent
        self._here = here
        if taken_back and not self._matcher.rollback(taken_back):
            raise self.problem()
        for each in reversed(wanted):
            fed = list(each.fed)
            if fed and self._matcher.try_consume_tokens(fed) != len(fed):
                raise self.problem()
            self._here = each
        return self._matcher

    def problem(self) -> GrammarError:
        """Return why the matcher cannot go on."""
        return GrammarError(f"the {self.grammar.noun} {_limit(self._matcher.get_error())}")


def _limit(error: str) -> str:
    """Return one sentence of what llguidance says when it gives up."""
    first = " ".join(error.split("<state>")[0].split())
    if first == "NoExtensionBias":
        return "allows only texts here that no token of this model begins: allow others"
    why = first[:300] or "no reason is given"
    return f"cannot be followed any further ({why}): give a simpler one"


class GrammarState:
    """The place after `length` tokens of a text; `parent` is the one before its last token.

    `fed` are the tokens that the matcher consumes on the way from there: that one, none where the
    grammar has not begun, the rest of a token that completes the marker. `tail` is the end of the
    text while the marker is waited for, else None. A place that is `closed` lies behind a token
    that the grammar forbids, or behind the end of the text: nothing is said of what follows.
    """

    __slots__ = (
        "_children",
        "_cursor",
        "_mask",
        "_over",
        "closed",
        "fed",
        "length",
        "parent",
        "tail",
    )

    def __init__(
        self,
        cursor: Cursor,
        length: int,
        parent: GrammarState | None = None,
        fed: tuple[int, ...] = (),
        tail: bytes | None = None,
        *,
        closed: bool = False,
    ) -> None:
        self._cursor, self.length, self.parent = cursor, length, parent
        self.fed, self.tail, self.closed = fed, tail, closed
        self._children: dict[int, GrammarState] = {}
        self._mask: Mask | None = None  # these are missing until they are asked for
        self._over: bool | None = None

    # -- moving ------------------------------------------------------------------------------------

    def after(self, tokens: Iterable[int]) -> GrammarState:
        """Return the place these tokens further on."""
        place = self
        for token in tokens:
            place = place._child(token)
        return place

    def moved(self, token: int) -> GrammarState:
        """Return the place after a token that was committed, forgetting how else it could go on."""
        place = self._child(token)
        self._children.clear()
        self._mask = None
        return place

    def _child(self, token: int) -> GrammarState:
        child = self._children.get(token)
        if child is None:
            child = self._children[token] = self._made(token)
        return child

    def _made(self, token: int) -> GrammarState:
        length, cursor = self.length + 1, self._cursor
        if self.closed or token in cursor.lexicon.end_tokens:
            return GrammarState(cursor, length, self, closed=True)
        if self.tail is None:
            closed = not self._may_follow((token,))
            return GrammarState(cursor, length, self, () if closed else (token,), closed=closed)
        tail = self.tail + cursor.lexicon.spelling(token)
        place = tail.find(cursor.marker)
        if place < 0:
            # No more is kept than a marker may begin with.
            kept = tail[max(0, len(tail) - len(cursor.marker) + 1) :]
            return GrammarState(cursor, length, self, (), kept)
        rest = cursor.lexicon.tokens_of(tail[place + len(cursor.marker) :])
        closed = rest is None or not self._may_follow(rest)
        return GrammarState(cursor, length, self, rest or (), closed=closed)

    def _may_follow(self, tokens: Sequence[int]) -> bool:
        size = self._cursor.lexicon.size
        if any(token >= size for token in tokens):
            return False
        return self._cursor.at(self).validate_tokens(list(tokens)) == len(tokens)

    # -- what is said of a place -------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the text is whole: the grammar allows nothing more."""
        if self._over is None:
            follows = not self.closed and self.tail is None
            matcher = self._cursor.at(self) if follows else None
            self._over = matcher is not None and matcher.is_stopped()
            if self._over and matcher is not None and matcher.is_error():
                raise self._cursor.problem()
        return self._over

    def allows(self, token: int) -> bool:
        """Whether a token may follow; false behind the end of the text and forbidden tokens."""
        if self.closed:
            return False
        if token in self._cursor.lexicon.end_tokens:
            return self.tail is not None or self._cursor.at(self).is_accepting()
        return not self._child(token).closed

    def forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that spell what the grammar forces; all of them are allowed.

        The text may be spelled otherwise: the target's law decides that.
        """
        if most < 1 or self.closed or self.tail is not None or self.is_over:
            return []
        place, found = self, list[int]()
        text = self._cursor.at(self).compute_ff_bytes()
        for token in self._cursor.lexicon.unambiguous_tokens_of(text)[:most]:
            if not place.allows(token):
                break
            found.append(token)
            place = place._child(token)
        return found

    def masked(self, logits: _Row, text: Sequence[int]) -> _Row:
        """Return a row after a text with -inf for what may not follow, a copy.

        `text` are all tokens, the first `length` of which lead to this place. Where the grammar
        says nothing, and where a drafter's row has none of the tokens that may follow, it is the
        row itself.
        """
        return self.after(text[self.length :])._masked(logits)

    def allowed(self, ids: npt.NDArray[np.intp]) -> Mask:
        """Return which of these tokens may follow; all, where the grammar says nothing."""
        mask = self._allowed
        if mask is None:
            return np.ones(len(ids), bool)
        return np.where(ids < len(mask), mask[np.minimum(ids, len(mask) - 1)], False)

    def _masked(self, logits: _Row) -> _Row:
        mask = self._allowed
        if mask is None:
            return logits
        n = min(len(mask), len(logits))
        kept = mask[:n].nonzero()[0]
        if not len(kept):
            return logits
        row: _Row = np.full_like(logits, -math.inf)
        row[kept] = logits[kept]
        return row

    @property
    def _allowed(self) -> Mask | None:
        """A bool for every token: may it follow? None where the grammar says nothing."""
        if self.closed:
            return None
        if self._mask is None:
            self._mask = self._after_marker() if self.tail is None else self._before_marker()
        return self._mask if len(self._mask) else None

    def _after_marker(self) -> Mask:
        matcher, size = self._cursor.at(self), self._cursor.lexicon.size
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise self._cursor.problem()
        return np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)

    def _before_marker(self) -> Mask:
        """Forbid the tokens that complete the marker and go on against the grammar; empty: none."""
        cursor, forbidden = self._cursor, list[int]()
        assert self.tail is not None
        for token, rest in cursor.lexicon.completing(self.tail, cursor.marker):
            tokens = cursor.lexicon.tokens_of(rest)
            if tokens is None or not self._may_follow(tokens):
                forbidden.append(token)
        mask = np.ones(cursor.lexicon.size if forbidden else 0, bool)
        mask[forbidden] = False
        return mask
