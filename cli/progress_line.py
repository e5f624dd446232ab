"""One line of progress that replaces itself: a bar, how much, and how long it will take. Screens only."""

from __future__ import annotations

import time

from specrun.cli.quantities import duration_text
from specrun.cli.terminal import Terminal

__all__ = ["ProgressLine"]

_WIDTH = 24


class ProgressLine:
    """Call it with what is done and the whole; `close` takes the line away."""

    def __init__(self, terminal: Terminal, what: str) -> None:
        self._terminal, self._what = terminal, what
        self._started = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Show how much is done."""
        share = done / total if total else 1.0
        full = round(_WIDTH * share)
        left = (time.monotonic() - self._started) * (1 - share) / share if share > 0 else 0.0
        bar = "=" * full + " " * (_WIDTH - full)
        self._terminal.passing(f"{self._what} [{bar}] {100 * share:.0f} %, {duration_text(left)} left")

    def close(self) -> None:
        """Take the line away."""
        self._terminal.passing("")
