"""Attention sinks and a window (StreamingLLM, Xiao et al. 2023): which tokens of a text are kept.

The first tokens, on which models rest attention that goes nowhere else, and the last ones. The
window moves in steps of its own size, so that it holds its size at least and twice that at most:
where it begins follows from the length of the text alone, and what moving costs (the kept tokens
are evaluated anew) comes to one more token of a batch for every token of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrun.bindings.errors import OptionError


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

    def cells(self, length: int, first: int) -> int:
        """Return how many of the first `length` tokens are kept by a window that begins there."""
        return length if length <= self.sink else self.sink + max(0, length - first)

    def tokens(self, cells: int, first: int) -> int:
        """Return the least length of which a window that begins there keeps so many tokens."""
        return cells if cells <= self.sink else first + cells - self.sink

    @property
    def most_cells(self) -> int:
        """The most tokens that are kept of a text, of any length."""
        return self.sink + 2 * self.size
