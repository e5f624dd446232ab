"""A head's rows of one conversation's text: its cached states of the target, and the waiting ones.

EAGLE's heads, Hydra's prefix layer and NextN blocks evaluate one row for each position of the
committed text and keep its keys and values in a cell of their cache. Rows wait until the head
drafts: they are then evaluated together with the draft, or many at once if nothing was
drafted for some rounds.

The facts are one value that is replaced as a whole, so that Ctrl-C at any line leaves the old
state or the new one, never half of a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from specrun.runtime.round.text import common_prefix

FloatRows = npt.NDArray[np.float32]
Said = TypeVar("Said")

_CHUNK = 64


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


_Held = tuple[int, int, int, tuple[FloatRows, ...], FloatRows | None, Said | None, FloatRows | None]
"""All that is known, as one value: base, count, end, pending, last, said, early.

The rows of positions `base` to `base + count - 1` lie in cells 0 to `count - 1`; those of the next
positions up to `end` are pending, pieces [n, ...] in their order, which nobody may change. `last`
[1, ...] are the numbers of the last row in a cell and `said` the head's result after it, both None
if they are not there any more. `early` [1, ...] is the row at `end`, whose token is not known
yet. A tuple with names would take several times as long to make and to take apart."""


class TextRows(Generic[Said]):
    """The rows of one conversation's text: which are known, which lie in cells, which wait.

    Row j is made of the target's state at position j, and depends on the tokens up to j + `ahead`:
    0 for the state alone, 1 for a pair of the state and the token after it. `evaluate` puts rows
    into their cells and returns the head's result after the last one; there are `n_cells`. At most
    `chunk` rows wait.

    With a `window` at most so many rows are kept. `drop(n, position)` then takes the first n, which
    begin at a position, out of their cells, and those behind move up; n is a multiple of `step`.
    `reads_all`: the rows of all positions are wanted; otherwise the last one's is enough.
    """

    def __init__(
        self,
        evaluate: Callable[[RowPiece], Said],
        n_cells: int,
        *,
        ahead: int,
        chunk: int = _CHUNK,
        window: int = 0,
        drop: Callable[[int, int], None] = lambda *_: None,
        step: int = 1,
        reads_all: bool = True,
    ) -> None:
        self._evaluate, self._n_cells, self._ahead = evaluate, n_cells, ahead
        self._chunk, self.window, self.reads_all = chunk, window, reads_all
        self._drop, self._step = drop, step
        self._most = min(window or n_cells, n_cells)
        # Rows belong to the beginning of it that they depend on. Later cells mean nothing: an
        # interrupt may have left it there.
        self._text: list[int] = []
        self._held: _Held[Said] = _nothing_from(0)

    @property
    def base(self) -> int:
        """The position of the first row."""
        return self._held[0]

    @property
    def count(self) -> int:
        """How many rows lie in cells."""
        return self._held[1]

    @property
    def room(self) -> int:
        """How many more rows the cells can take, after all that wait."""
        base, _, end, *_ = self._held
        return self._n_cells - (end - base)

    # -- learning ----------------------------------------------------------------------------------

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the rows that hold for a text.

        The row before its last token, from which the first draft follows, is to be shown again.
        """
        # The state that the first draft comes from is of the
        # token before the last, which must be new.
        self.cut(common_prefix(self._text, tokens))
        self._keep(len(tokens) - 1)

    def take_over(self, other: Self, length: int, copy: Callable[[int, int], bool]) -> int:
        """Take over another conversation's rows of a text's first `length` tokens.

        They replace all that is known here. `copy` copies so many of its cells, of the rows from a
        position on; False: that is impossible, and nothing was changed. Returns from which position
        on rows are to be learnt, 0 in that case. Rows that a window has left behind are to be
        learnt again.
        """
        if not self.reads_all:
            return length
        if self.window and other.base > max(0, length - self._ahead - self.window):
            return max(0, length - self._ahead - self.window)
        base, count, end, pending, *_ = other._held
        if base >= length - self._ahead:  # it has given up what came before
            return 0
        held, self._held = self._held, _nothing_from(0)
        if count and not copy(base, count):
            self._held = held
            return 0
        self._text = list(other._text)
        self._held = base, count, end, pending, None, None, None
        self.cut(length)
        return max(0, min(length, self._held[2]))

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self._keep(length - self._ahead)

    def _keep(self, end: int) -> None:
        """Keep the rows of positions before `end`."""
        base, count, known, pending, last, said, _ = self._held
        n = end - base
        # Nothing to forget behind the known ones.
        if end >= known:
            return
        if n <= 0:
            self._held = _nothing_from(0)
        elif n < count:
            self._held = base, n, end, (), None, None, None
        else:
            # Cells stay; of the pending rows those that still hold.
            pending = (_joined(pending)[: n - count],) if n > count else ()
            self._held = base, count, end, pending, last, said, None

    def learn(self, start: int, rows: FloatRows, tokens: Sequence[int]) -> None:
        """Take the rows [n, ...] of positions `start` on of the text `tokens`, never to be changed.

        The token after the last of them may be missing. Known facts stay. If rows are
        missing before these, or come before all that are known, the others are given up: the head
        then sees less of the text, which costs acceptance and nothing else.
        """
        base, count, end, pending, last, said, early = self._held
        # The row that came too early has its token now: it goes in front of the new ones.
        if early is not None and start == end + 1:
            start, rows = end, np.concatenate([early, rows])
        if self.window and len(rows) > self.window:
            start, rows = start + len(rows) - self.window, rows[-self.window :]
        if not base <= start <= end:
            # A gap, or an earlier beginning: rows in cells are of consecutive positions.
            self._held = _nothing_from(start)
            base, count, end, pending, last, said, early = self._held
            self._text = list(tokens[: max(0, start)])
        if self.window and start + len(rows) - base > self.window:
            self._drop_first(start + len(rows) - base - self.window)
            base, count, end, pending, last, said, early = self._held
        known = end
        ready = min(len(rows), len(tokens) - self._ahead - start)  # whose tokens are known
        end = max(known, min(start + ready, base + self._most))
        early = early if end == known else None
        # The row that has no token yet is kept, or the next round would begin behind a gap.
        if ready < len(rows) and end == start + ready:
            early = rows[ready : ready + 1]
        all_in_cells = end == known and count and not pending
        if all_in_cells and last is None and start < known <= start + len(rows):
            last = rows[known - 1 - start : known - start]  # it may have to be evaluated again
        self._text[max(0, known) :] = tokens[max(0, known) : end + self._ahead]
        if end > known:
            pending = (*pending, rows[known - start : end - start])
        self._held = base, count, end, pending, last, said, early
        # Long prompts go into cells piece by piece: pending states are many numbers.
        while self._n_pending > self._chunk:
            self._put(self._chunk)

    def _drop_first(self, n: int) -> None:
        """Forget the first n rows or a few more, whatever the others have of them."""
        while self._n_pending:
            self._put(min(self._chunk, self._n_pending))
        base, count, end, _, last, said, early = self._held
        n = min(count, -(-n // self._step) * self._step)
        last, said = (None, None) if n == count else (last, said)
        # Nothing is known while cells move: an interrupt leaves that.
        self._held = _nothing_from(end)
        self._drop(n, base)
        self._held = base + n, count - n, end, (), last, said, early

    # -- drafting ----------------------------------------------------------------------------------

    def said(self, tokens: Sequence[int]) -> Said | None:
        """Return the head's result after the row before a text's last token; None if unknown."""
        if not self._is_known(tokens):
            return None
        # The head's result was not kept: the last row is evaluated again.
        if self._held[5] is None:
            self._return_last()
        while (waiting := self._n_pending) > 0:
            self._put(min(self._chunk, waiting))
        return self._held[5]

    def forget_said(self) -> None:
        """Have the last row evaluated again before any result after it."""
        self._return_last()

    def due(self, tokens: Sequence[int], most: int) -> RowPiece | None:
        """Return up to `most` rows before a text's last token, to be evaluated with a draft.

        Earlier ones are put into their cells. None if the last row is not known. Their
        evaluation is confirmed by `settle`, and otherwise they are due again.
        """
        if not self._is_known(tokens):
            return None
        if not self._n_pending:
            self._return_last()
        # At least one row stays for the draft's own graph, which needs a row to go on from.
        while (waiting := self._n_pending) > most:
            self._put(min(self._chunk, waiting - 1))
        return self._piece(waiting) if waiting else None

    def settle(self, piece: RowPiece, said: Said | None = None) -> None:
        """Note that the first pending rows lie in their cells, and the head's result then."""
        base, count, end, pending, _, _, early = self._held
        rows = piece.rows
        n = len(rows)
        count += n
        last = rows if n == 1 else rows[n - 1 :]
        pending = (_joined(pending)[n:],) if base + count < end else ()
        # One assignment: an interrupt leaves either the old state or the new one.
        self._held = base, count, end, pending, last, said, early

    @property
    def _n_pending(self) -> int:
        base, count, end, *_ = self._held
        return end - base - count

    def _is_known(self, tokens: Sequence[int]) -> bool:
        """Return whether the last row is the one before a text's last token."""
        held = self._held
        end = held[2]
        # No row of this text at all, or the state of the last but one token is missing.
        if end != len(tokens) - 1 or end == held[0]:
            return False
        newest = end - 1 + self._ahead
        # With `ahead` 1 the row depends on the text's last token, which may be another one now.
        return self._text[newest] == tokens[newest]

    def _return_last(self) -> None:
        """Let the last row wait again if none does: it is to be evaluated once more."""
        base, count, end, _, last, _, early = self._held
        if end == base + count and last is not None:
            self._held = base, count - 1, end, (last,), None, None, early

    def _put(self, n: int) -> None:
        piece = self._piece(n)
        self.settle(piece, self._evaluate(piece))

    def _piece(self, n: int) -> RowPiece:
        """Return the first n pending rows; there must be as many."""
        base, count, end, pending, _, _, _ = self._held
        position = base + count
        rows = pending[0] if len(pending) == 1 else _joined(pending)
        if position + n < end:
            rows = rows[:n]
        first = position + self._ahead
        return RowPiece(self._text[first : first + n], rows, position, count)


def _nothing_from(base: int) -> _Held[Any]:
    """Return the facts if rows from a position on are to come."""
    return base, 0, base, (), None, None, None


def _joined(pending: tuple[FloatRows, ...]) -> FloatRows:
    """Return pending rows as one array."""
    # Only when they are read: rows wait for many rounds if nothing is drafted.
    return pending[0] if len(pending) == 1 else np.concatenate(pending)
