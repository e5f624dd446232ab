"""Places of a text under a grammar: the possible next tokens of each (llguidance's token masks).

A place is known by the tokens that lead to it, and its next tokens do not depend on the order of
questions: nobody advances a grammar, so nobody can leave it advanced by a branch of a draft
tree that was rejected. Behind that, one matcher moves to and fro between places: `Cursor` has it
take back tokens down to where two texts part, and consume the other's tokens. It
lives in a process of its own, so whoever has other answers to go on with need not wait for it.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import ClosedError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.grammar.grammar import Grammar, GrammarError
from specrun.runtime.grammar.process import GrammarProcess, ProcessEnded

PLACE_SECONDS = 5.0
"""The time limit for the next tokens of a place; most take microseconds."""
_POLL_SECONDS = 0.002
_SLOW_SECONDS = 0.02
_NAMED = re.compile(rb"\xff\[(\d+)\]")
_LONGEST_TOKEN = 32  # bytes, as far as the end of a forced text is looked at
Mask = npt.NDArray[np.bool_]
_Row = TypeVar("_Row", bound=npt.NDArray[np.floating])


class Seen(NamedTuple):
    """A matcher's facts of a place: the next tokens, and the seconds that it took to find them.

    A bit for every token, lowest first; whether the text may end there, has to, and the forced
    text.
    """

    bits: bytes
    may_end: bool
    is_over: bool
    forced: bytes
    seconds: float


class Lexicon:
    """The spellings of a vocabulary; it must not keep that, whose life its own follows."""

    def __init__(self, vocabulary: Vocabulary, spelled: list[bytes]) -> None:
        self.size, self.end_tokens = vocabulary.size, vocabulary.end_of_generation
        self._vocabulary = weakref.ref(vocabulary)
        self._spelled = spelled
        # By marker: for each beginning of it that a text may end with, the tokens that then have
        # its rest and more.
        self._completing: dict[bytes, list[list[int]]] = {}

    def spelling(self, token: int) -> bytes:
        """Return a token's bytes; control tokens are shown by name."""
        return self._spelled[token] if token < self.size else b""

    def tokens_of(self, text: bytes) -> tuple[int, ...] | None:
        """Return tokens that spell these bytes; None if there are none."""
        tokens = tuple(self._tokens_within(text))
        return tokens if b"".join(map(self.spelling, tokens)) == text else None

    def unambiguous_tokens_of(
        self, text: bytes, preference: npt.NDArray[np.floating] | None = None
    ) -> list[int]:
        """Return tokens that spell these bytes, but for an end that may depend on the next text.

        They are the tokenizer's own or, with a `preference` (a number for each token), of those
        that may come next the preferred ones. Tokens that a grammar names by their ids stand as
        llguidance writes them.
        """
        *before, text = _NAMED.split(text)
        named = [
            token
            for number, part in enumerate(before)
            for token in ([int(part)] if number % 2 else self._spelt(part, preference))
        ]
        tokens = self._spelt(text, preference)
        rest, sure = b"", len(tokens)
        for index in range(len(tokens) - 1, -1, -1):
            rest = self.spelling(tokens[index]) + rest
            if len(rest) > _LONGEST_TOKEN:
                break
            place = bisect.bisect_right(self._sorted, rest)
            if place < len(self._sorted) and self._sorted[place].startswith(rest):
                sure = index  # a longer token begins so
        return [*named, *tokens[:sure]]

    def _spelt(self, text: bytes, preference: npt.NDArray[np.floating] | None) -> list[int]:
        if preference is None:
            return self._tokens_within(text)
        found, start = list[int](), 0
        while start < len(text):
            most = min(_LONGEST_TOKEN, len(text) - start)
            pieces = (text[start : start + n] for n in range(1, most + 1))
            tokens = [known for piece in pieces if (known := self._token_of.get(piece)) is not None]
            if not tokens:
                break
            found.append(max(tokens, key=lambda token: float(preference[token])))
            start += len(self.spelling(found[-1]))
        return found

    @functools.cached_property
    def _token_of(self) -> dict[bytes, int]:
        """Tokens by their bytes. Of several the last one: single bytes come before others."""
        return {text: token for token, text in enumerate(self._spelled) if text}

    @functools.cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self._spelled)

    def _tokens_within(self, text: bytes) -> list[int]:
        """Return the tokens of a text in the middle of another; none if the model is closed."""
        vocabulary = self._vocabulary()
        try:
            return vocabulary.tokenize_within(text) if vocabulary is not None and text else []
        except ClosedError:
            return []

    def completing(self, tail: bytes, marker: bytes) -> Iterator[tuple[int, bytes]]:
        """Return the tokens that complete a marker after a tail and go on, with their rests."""
        table = self._completing.get(marker)
        if table is None:
            table = self._completing[marker] = self._completing_any(marker)
        for begun, tokens in enumerate(table):
            if not tail.endswith(marker[:begun]):
                continue
            for token in tokens:
                text = tail + self._spelled[token]
                yield token, text[text.find(marker) + len(marker) :]

    def _completing_any(self, marker: bytes) -> list[list[int]]:
        table: list[list[int]] = [[] for _ in marker]
        rests = [marker[begun:] for begun in range(1, len(marker))]
        beginnings = tuple(rests)
        for token, text in enumerate(self._spelled):
            if -1 < text.find(marker) < len(text) - len(marker):
                table[0].append(token)
            if text.startswith(beginnings):  # few are, and those are looked at
                for begun, rest in enumerate(rests, 1):
                    if text.startswith(rest) and len(text) > len(rest):
                        table[begun].append(token)
        return table


@dataclass(eq=False, repr=False)
class Cursor:
    """One matcher, which stands at one place; it is moved to another to find the next tokens there.

    With `patience`, whoever has other conversations to go on with waits no longer than that for a
    draft's places (`hurries`) and for the end of a text; without, and if the distribution needs
    them, until they are known. A place that takes longer than `PLACE_SECONDS` ends the answer.
    """

    _matcher: GrammarProcess
    grammar: Grammar
    lexicon: Lexicon
    patience: float | None = None
    hurries: bool = False
    _here: GrammarState | None = None
    _asked: GrammarState | None = None

    def __post_init__(self) -> None:
        self.marker = self.grammar.after.encode()

    def see(self, place: GrammarState, wait: float | None) -> Seen | None:
        """Return the next tokens of a place, None if they are not known within so many seconds."""
        if self._asked is not None and self._asked is not place and not self._answered(wait):
            return None
        if place.seen is None and not place.problem:
            if self._asked is None:
                self._ask("look", place)
                self._asked = place
            self._answered(wait)
        if place.problem and not self.hurries:  # in a draft it is a place that nobody goes to
            raise self._problem(place.problem)
        return place.seen

    def follow(self, place: GrammarState, texts: list[list[int]]) -> list[bool]:
        """Return which texts, as tokens, may follow a place as a whole."""
        if self._asked is not None:
            self._answered(None)
        self._ask("follow", place, texts)
        found = self._reply(None)
        if isinstance(found, str):
            raise self._problem(found)
        return list(found)

    def close(self) -> None:
        """End the matcher: these places are not needed any more."""
        self._matcher.close()

    def _answered(self, wait: float | None) -> bool:
        """Whether the requested place is known now."""
        reply = self._reply(wait)
        if reply is None:
            return False
        asked, self._asked = self._asked, None
        assert asked is not None
        if isinstance(reply, str):
            asked.problem = reply
        else:
            asked.seen = Seen(*reply)
        return True

    def _reply(self, wait: float | None) -> Any:  # noqa: ANN401 - of any request
        try:
            return self._matcher.reply(wait)
        except ProcessEnded as ended:
            why = "it takes more memory than it may"
            if not ended.in_time:
                why = f"finding the possible next tokens takes longer than {PLACE_SECONDS:g} s"
            raise self._problem(why) from None

    def _ask(self, name: str, place: GrammarState, *arguments: object) -> None:
        """Move the matcher to a place, and send it a request there."""
        here, taken_back = self._here, 0
        wanted: list[GrammarState] = []
        ahead: GrammarState | None = place
        while here is not ahead:
            if here is not None and (ahead is None or here.length >= ahead.length):
                taken_back += len(here.fed)
                here = here.parent
            elif ahead is not None:
                wanted.append(ahead)
                ahead = ahead.parent
        fed = [token for each in reversed(wanted) for token in each.fed]
        try:
            self._matcher.ask(name, PLACE_SECONDS, taken_back, fed, *arguments)
        except ProcessEnded:
            raise self._problem("its process has ended") from None
        self._here = place

    def _problem(self, error: str) -> GrammarError:
        """Return the error of an answer, in one sentence of llguidance's."""
        first = " ".join(error.split("<state>")[0].split())
        noun, why = self.grammar.noun, first[:300] or "no reason is given"
        if first == "NoExtensionBias":
            problem = "allows only texts here that no token of this model begins: allow others"
            return GrammarError(f"the {noun} {problem}")
        return GrammarError(
            f"the {noun} cannot be followed any further ({why}): give a simpler one"
        )


@dataclass(slots=True, eq=False, repr=False)
class GrammarState:
    """The place after `length` tokens of a text; `parent` is the one before its last token.

    `fed` are the tokens that the matcher consumes on the way from there: that one, none if the
    grammar has not begun, the rest of a token that completes the marker. `tail` is the end of the
    text while the marker is waited for, else None. A place that is `closed` lies behind a token
    that the grammar forbids, or behind the end of the text: nothing is known of the next tokens.
    """

    _cursor: Cursor
    length: int
    parent: GrammarState | None = None
    fed: tuple[int, ...] = ()
    tail: bytes | None = None
    closed: bool = False
    seen: Seen | None = None  # until it is needed
    problem: str = ""
    _children: dict[int, GrammarState] = field(default_factory=dict)
    _mask: Mask | None = None

    # -- moving ------------------------------------------------------------------------------------

    def after(self, tokens: Iterable[int]) -> GrammarState:
        """Return the place these tokens further on."""
        place = self
        for token in tokens:
            place = place.child(token)
        return place

    def moved(self, token: int) -> GrammarState:
        """Return the place after a token that was committed, forgetting how else it could go on."""
        place = self.child(token)
        self._children.clear()
        self._mask = self.seen = None
        return place

    def child(self, token: int) -> GrammarState:
        """Return the place behind one more token."""
        child = self._children.get(token)
        if child is None:
            child = self._made(token)
            if self.is_known:  # else it is closed for now
                self._children[token] = child
        return child

    def _made(self, token: int) -> GrammarState:
        length, cursor = self.length + 1, self._cursor
        if self.closed or token in cursor.lexicon.end_tokens:
            return GrammarState(cursor, length, self, closed=True)
        if self.tail is None:
            seen, byte = self._look(), token >> 3
            closed = seen is None or byte >= len(seen.bits) or not seen.bits[byte] >> token % 8 & 1
            return GrammarState(cursor, length, self, () if closed else (token,), closed=closed)
        tail = self.tail + cursor.lexicon.spelling(token)
        place = tail.find(cursor.marker)
        if place < 0:
            # No more is kept than a marker may begin with.
            kept = tail[max(0, len(tail) - len(cursor.marker) + 1) :]
            return GrammarState(cursor, length, self, (), kept)
        rest = cursor.lexicon.tokens_of(tail[place + len(cursor.marker) :])
        closed = rest is None or not self._may_follow([list(rest)])[0]
        return GrammarState(cursor, length, self, rest or (), closed=closed)

    def _may_follow(self, texts: list[list[int]]) -> list[bool]:
        """Return which texts, as tokens, may follow the beginning of the grammar."""
        if all(not text for text in texts):
            return [True] * len(texts)
        size = self._cursor.lexicon.size
        known = [text for text in texts if all(token < size for token in text)]
        found = dict(zip(map(tuple, known), self._cursor.follow(self, known), strict=True))
        return [found.get(tuple(text), False) for text in texts]

    # -- the facts of a place ----------------------------------------------------------------------

    def _look(self, wait: float | None = None) -> Seen | None:
        """Return the matcher's facts here; None if that takes longer than it may."""
        if self.seen is not None:
            return self.seen
        cursor = self._cursor
        return cursor.see(self, cursor.patience if wait is None and cursor.hurries else wait)

    @property
    def is_known(self) -> bool:
        """Whether the next tokens were found, if they are needed."""
        return self.closed or self.tail is not None or self.seen is not None

    @property
    def is_seen(self) -> bool:
        """Whether the next tokens are known, or can be found in time."""
        return self.is_known or self._look() is not None

    @property
    def is_ready(self) -> bool:
        """Whether the next tokens are known, or may be waited for: nobody else has to go on."""
        if self.is_known or self._cursor.patience is None:
            return True
        return self._look(_POLL_SECONDS) is not None

    @property
    def is_slow(self) -> bool:
        """Whether it took so long that nobody should wait for places behind this one, too."""
        seen, patience = self.seen, self._cursor.patience
        return seen is not None and seen.seconds > _SLOW_SECONDS and patience is not None

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Wait for the next tokens of places no longer than the answer's patience."""
        self._cursor.hurries = True
        try:
            yield
        finally:
            self._cursor.hurries = False

    def close(self) -> None:
        """End the matcher of this text: its places are not needed any more."""
        self._cursor.close()

    @property
    def is_over(self) -> bool:
        """Whether the text is whole: the grammar allows nothing more.

        False if finding out takes longer than may be waited for: only its end may follow then.
        """
        if self.closed or self.tail is not None:
            return False
        seen = self._look(self._cursor.patience)
        return seen is not None and seen.is_over

    def allows(self, token: int) -> bool:
        """Whether a token may follow; false behind the end of the text and forbidden tokens."""
        if self.closed:
            return False
        if token in self._cursor.lexicon.end_tokens:
            seen = None if self.tail is not None else self._look()
            return self.tail is not None or (seen is not None and seen.may_end)
        return not self.child(token).closed

    def forced(self, most: int, preference: npt.NDArray[np.floating] | None = None) -> list[int]:
        """Return up to `most` tokens that spell the grammar's forced text; all of them are allowed.

        The text may be spelled otherwise: the target's distribution decides that. `preference` is
        that of `Lexicon.unambiguous_tokens_of`.
        """
        if most < 1 or self.closed or self.tail is not None or self.is_over:
            return []
        place, found, seen = self, list[int](), self._look()
        text = b"" if seen is None else seen.forced
        for token in self._cursor.lexicon.unambiguous_tokens_of(text, preference)[:most]:
            if not place.allows(token):
                break
            found.append(token)
            place = place.child(token)
        return found

    def masked(self, logits: _Row, text: Sequence[int]) -> _Row:
        """Return a row after a text with -inf for forbidden tokens, a copy.

        `text` are all tokens, the first `length` of which lead to this place. If the grammar
        restricts nothing, or if a drafter's row has none of the tokens that may follow, it is the
        row itself.
        """
        mask = self.after(text[self.length :])._allowed
        if mask is None:
            return logits
        n = min(len(mask), len(logits))
        kept = mask[:n].nonzero()[0]
        if not len(kept):
            return logits
        row: _Row = np.full_like(logits, -math.inf)
        row[kept] = logits[kept]
        return row

    def allowed(self, ids: npt.NDArray[np.intp]) -> Mask:
        """Return which of these tokens may follow; all, if the grammar restricts nothing."""
        mask = self._allowed
        if mask is None:
            return np.ones(len(ids), bool)
        return np.where(ids < len(mask), mask[np.minimum(ids, len(mask) - 1)], False)

    @property
    def _allowed(self) -> Mask | None:
        """A bool for every token: may it follow? None if the grammar restricts nothing."""
        if self.closed:
            return None
        if self._mask is None and self.tail is not None:
            self._mask = self._before_marker(self.tail)
        elif self._mask is None and (seen := self._look()) is not None:
            bits, size = np.frombuffer(seen.bits, np.uint8), self._cursor.lexicon.size
            self._mask = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        return self._mask if self._mask is not None and len(self._mask) else None

    def _before_marker(self, tail: bytes) -> Mask:
        """Forbid the tokens that complete the marker and go on against the grammar; empty: none."""
        cursor, forbidden = self._cursor, list[int]()
        completing = list(cursor.lexicon.completing(tail, cursor.marker))
        rests = [cursor.lexicon.tokens_of(rest) for _, rest in completing]
        may = self._may_follow([list(rest or ()) for rest in rests])
        for (token, _), rest, allowed in zip(completing, rests, may, strict=True):
            if rest is None or not allowed:
                forbidden.append(token)
        mask = np.ones(cursor.lexicon.size if forbidden else 0, bool)
        mask[forbidden] = False
        return mask
