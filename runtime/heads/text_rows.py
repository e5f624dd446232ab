"""A head's rows of one conversation's text: what of the target's states it has cached, what waits.

EAGLE's heads, Hydra's prefix layer and NextN blocks evaluate one row for each position of the
committed text and keep its keys and values in a cell of their cache. Rows wait until the head is
asked to draft: they are then evaluated together with the draft, or many at once where nothing was
drafted for some rounds.

What is known is one value that is replaced as a whole, so that Ctrl-C at any line leaves the old
state or the new one, never half of a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from specrun.runtime.text import common_prefix

FloatRows = npt.NDArray[np.float32]
Said = TypeVar("Said")

_CHUNK = 64


class PendingRows:
    """A queue of rows; every change makes a new one, and copies none of the numbers."""

    __slots__ = ("_n", "_pieces")

    def __init__(self, pieces: tuple[FloatRows, ...] = (), n: int = 0) -> None:
        self._pieces, self._n = pieces, n

    def __len__(self) -> int:
        return self._n

    def add(self, rows: FloatRows) -> PendingRows:
        """Append rows [n, ...], which nobody may change any more."""
        n = len(rows)
        return PendingRows((*self._pieces, rows), self._n + n) if n else self

    def first(self, n: int) -> FloatRows:
        """Return the first n rows, or all if there are fewer; there must be some."""
        # Concatenated only when read: rows wait for many rounds where nothing is drafted.
        rows = self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)
        return rows if n >= self._n else rows[:n]

    def keep(self, n: int) -> PendingRows:
        """Leave out all but the first n rows."""
        if n >= self._n:
            return self
        return PendingRows((self.first(n),), n) if n > 0 else NONE_PENDING

    def drop(self, n: int) -> PendingRows:
        """Leave out the first n rows."""
        if n >= self._n:
            return NONE_PENDING
        return PendingRows((self.first(self._n)[n:],), self._n - n)


NONE_PENDING = PendingRows()
"""No rows."""


@dataclass(slots=True)
class RowPiece:
    """Rows [n, ...] of positions `position` on, which go into the cells after the first `count`.

    `tokens` are those that each row brings along: the last one that it depends on.
    """

    tokens: list[int]
    rows: FloatRows
    position: int
    count: int

    def __len__(self) -> int:
        return len(self.rows)


class _Held(NamedTuple, Generic[Said]):
    """All that is known, as one value.

    The rows of positions `base` to `base + count - 1` lie in cells 0 to `count - 1`, those of the
    next positions are pending. `last` [1, ...] are the numbers of the last row in a cell and `said`
    what the head said after it, both None where they are not there any more. `early` [1, ...] is
    the row after all of these, whose token is not known yet.
    """

    base: int = 0
    count: int = 0  # type: ignore[assignment]  # a tuple counts its elements, too
    pending: PendingRows = NONE_PENDING
    last: FloatRows | None = None
    said: Said | None = None
    early: FloatRows | None = None

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self[0] + self[1] + self[2]._n


class TextRows(Generic[Said]):
    """The rows of one conversation's text: which are known, which lie in cells, which wait.

    Row j is made of the target's state at position j, and depends on the tokens up to j + `ahead`:
    0 for the state alone, 1 for a pair of the state and the token after it. `evaluate` puts rows
    into their cells and returns what the head says after the last one; there are `n_cells`. At most
    `chunk` rows wait.
    """

    reads_all = True
    """Whether the rows of all positions are wanted; otherwise the last one's is enough."""

    def __init__(
        self, evaluate: Callable[[RowPiece], Said], n_cells: int, *, ahead: int, chunk: int = _CHUNK
    ) -> None:
        self._evaluate, self._n_cells, self._ahead = evaluate, n_cells, ahead
        self._chunk = chunk
        # Rows belong to the beginning of it that they depend on. What may follow means nothing: an
        # interrupt may have left it there.
        self._text: list[int] = []
        self._held: _Held[Said] = _Held()

    @property
    def base(self) -> int:
        """The position of the first row."""
        return self._held.base

    @property
    def count(self) -> int:
        """How many rows lie in cells."""
        return self._held.count

    @property
    def room(self) -> int:
        """How many more rows the cells can take, after all that wait."""
        held = self._held
        return self._n_cells - held.count - held.pending._n

    # -- learning ----------------------------------------------------------------------------------

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the rows that hold for a text.

        The row before its last token, from which the first draft follows, is to be shown again.
        """
        # The state that the first draft comes from is of the
        # token before the last, which must be new.
        self.cut(common_prefix(self._text, tokens))
        self._keep(len(tokens) - 1)

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self._keep(length - self._ahead)

    def _keep(self, end: int) -> None:
        """Keep the rows of positions before `end`."""
        held = self._held
        n = end - held.base
        # Nothing to forget behind what is known.
        if end >= held.end:
            return
        if n <= 0:
            self._held = _Held()
        elif n < held.count:
            self._held = _Held(held.base, n)
        else:
            # What lies in cells stays; of the pending rows those that still hold.
            pending = held.pending.keep(n - held.count)
            self._held = held._replace(pending=pending, early=None)

    def learn(self, start: int, rows: FloatRows, tokens: Sequence[int]) -> None:
        """Take the rows [n, ...] of positions `start` on of the text `tokens`, never to be changed.

        The token after the last of them may be missing. What is known already stays. Where rows are
        missing before these, or come before all that are known, the others are given up: the head
        then sees less of the text, which costs acceptance and nothing else.
        """
        base, count, pending, last, said, early = held = self._held
        after, ready = start + len(rows), len(tokens) - self._ahead
        if start == base + count + pending._n > base and start < after <= ready:
            # What most rounds do: rows that follow those that are known, with all their tokens.
            pending = PendingRows((*pending._pieces, rows), pending._n + len(rows))
            if early is None and after - base <= self._n_cells and pending._n <= self._chunk:
                self._text[start:] = tokens[start : after + self._ahead]
                self._held = _Held(base, count, pending, last, said)
                return
        # The row that came too early has its token now: it goes in front of the new ones.
        if held.early is not None and start == held.end + 1:
            start, rows = held.end, np.concatenate([held.early, rows])
        if not held.base <= start <= held.end:
            # A gap, or an earlier beginning: rows in cells are of consecutive positions.
            self._held = held = _Held(base=start)
            self._text = list(tokens[: max(0, start)])
        known = held.end
        ready = min(len(rows), len(tokens) - self._ahead - start)  # whose tokens are known
        end = max(known, min(start + ready, held.base + self._n_cells))
        last, early = held.last, held.early if end == known else None
        # The row that has no token yet is kept, or the next round would begin behind a gap.
        if ready < len(rows) and end == start + ready:
            early = rows[ready : ready + 1]
        all_in_cells = end == known and held.count and not held.pending
        if all_in_cells and last is None and start < known <= start + len(rows):
            last = rows[known - 1 - start : known - start]  # it may have to be evaluated again
        self._text[max(0, known) :] = tokens[max(0, known) : end + self._ahead]
        pending = held.pending.add(rows[known - start : end - start])
        self._held = _Held(held.base, held.count, pending, last, held.said, early)
        # Long prompts go into cells piece by piece: pending states are many numbers.
        while len(self._held.pending) > self._chunk:
            self._put(self._chunk)

    # -- drafting ----------------------------------------------------------------------------------

    def said(self, tokens: Sequence[int]) -> Said | None:
        """Return what the head says after the row before a text's last token; None if unknown."""
        if not self._is_known(tokens):
            return None
        # What the head said was not kept: the last row is evaluated again.
        if self._held.said is None:
            self._return_last()
        while self._held.pending._n:
            self._put(self._chunk)
        return self._held.said

    def forget_said(self) -> None:
        """Have the last row evaluated again before anything is said after it."""
        self._return_last()

    def due(self, tokens: Sequence[int], most: int) -> RowPiece | None:
        """Return up to `most` rows before a text's last token, to be evaluated with a draft.

        Earlier ones are put into their cells. None where the last row is not known. Whoever has
        evaluated them says so (`settle`), and otherwise they are due again.
        """
        if not self._is_known(tokens):
            return None
        if not self._held.pending._n:
            self._return_last()
        # At least one row stays for the draft's own graph, which needs a row to go on from.
        while (waiting := self._held.pending._n) > most:
            self._put(min(self._chunk, waiting - 1))
        return self._piece(waiting) if waiting else None

    def settle(self, piece: RowPiece, said: Said | None = None) -> None:
        """Note that the first pending rows lie in their cells, and what the head said then."""
        (base, count, pending, _, _, early), rows = self._held, piece.rows
        n = len(rows)
        # One assignment: an interrupt leaves either the old state or the new one.
        last = rows if n == 1 else rows[n - 1 :]
        pending = NONE_PENDING if n == pending._n else pending.drop(n)
        self._held = _Held(base, count + n, pending, last, said, early)

    def _is_known(self, tokens: Sequence[int]) -> bool:
        """Return whether the last row is the one before a text's last token."""
        base, count, pending, *_ = self._held
        end = base + count + pending._n
        # No row of this text at all, or the state of the last but one token is missing.
        if end != len(tokens) - 1 or end == base:
            return False
        newest = end - 1 + self._ahead
        # With `ahead` 1 the row depends on the text's last token, which may be another one now.
        return self._text[newest] == tokens[newest]

    def _return_last(self) -> None:
        """Let the last row wait again where none does: it is to be evaluated once more."""
        held = self._held
        if not held.pending._n and held.last is not None:
            waiting = PendingRows((held.last,), 1)
            self._held = _Held(held.base, held.count - 1, waiting, early=held.early)

    def _put(self, n: int) -> None:
        piece = self._piece(n)
        self.settle(piece, self._evaluate(piece))

    def _piece(self, n: int) -> RowPiece:
        base, count, pending, *_ = self._held
        position = base + count
        first = position + self._ahead
        rows = pending._pieces[0] if n == pending._n == 1 else pending.first(n)
        return RowPiece(self._text[first : first + len(rows)], rows, position, count)


def copied_rows(read: Callable[[int], FloatRows], wanted: Sequence[int]) -> FloatRows:
    """Return a copy [n, ...] of rows that die with the next evaluation."""
    # One row is what most rounds have, and several times as quick as a stack of one.
    if len(wanted) == 1:
        return np.array(read(wanted[0]), ndmin=2)
    return np.stack([read(row) for row in wanted])
