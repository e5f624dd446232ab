"""Attention sinks and a window (StreamingLLM, Xiao et al. 2023): which tokens of a text are kept.

The first tokens, on which models rest attention that goes nowhere else, and the last ones. The
window moves in steps of its own size, so that it holds its size at least and twice that at most:
where it begins follows from the length of the text alone, and what moving costs (the kept tokens
are evaluated anew) comes to one more token of a batch for every token of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.partial.chunks import ChunkMemory


@dataclass(frozen=True, slots=True)
class Window:
    """Keeps the first `sink` tokens of a text, and of the others the last `size` at least."""

    sink: int
    size: int

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise OptionError(f"sink is {self.sink}: give 0 or more of a text's first tokens")
        if self.size < 1:
            raise OptionError(f"window is {self.size}: give at least 1 of a text's last tokens")

    def first_kept(self, length: int) -> int:
        """Return where the window begins in a text of so many tokens: what is before is dropped.

        The sink, as long as nothing is dropped.
        """
        return max(self.sink, (length // self.size - 1) * self.size)

    @property
    def most_cells(self) -> int:
        """The most tokens that are kept of a text, of any length."""
        return self.sink + 2 * self.size


class KeptTokens:
    """Which tokens of one growing text a cache holds: sink, chosen chunks, and a window.

    The cells are in the order of the text. The window stands where the last `move` put it: it
    begins at token `first`, and `between` are the tokens that are kept of those before it.
    """

    def __init__(self, window: Window, chunks: ChunkMemory | None = None) -> None:
        self.window, self.chunks = window, chunks
        self.first = window.sink
        self.between: Sequence[int] = ()

    def cells(self, length: int) -> int:
        """Return how many cells hold what is kept of the first `length` tokens.

        Of a text that was cut to before the window the sink alone.
        """
        sink = self.window.sink
        if length <= sink or length < self.first:
            return min(length, sink)
        return sink + len(self.between) + length - self.first

    def tokens(self, cells: int) -> int:
        """Return how many tokens of the text are read where so many cells are filled."""
        beyond = cells - self.window.sink - len(self.between)
        return self.first + beyond if beyond >= 0 else min(cells, self.window.sink)

    def is_to_move(self, length: int, n_read: int) -> bool:
        """Whether the window has to move for a text of `length` tokens, of which so many are read.

        Of one that was cut to before the window nothing is left in it.
        """
        first = self.window.first_kept(length)
        return first != self.first or first > max(n_read, self.window.sink)

    def move(self, length: int) -> None:
        """Move the window to where a text of so many tokens has it, and choose what is before."""
        window, chunks = self.window, self.chunks
        self.first = first = window.first_kept(length)
        # Of the shortest text that has the window there all but the last token was evaluated.
        now = first + window.size - 1
        self.between = () if chunks is None else chunks.choose(window.sink, first, now)
