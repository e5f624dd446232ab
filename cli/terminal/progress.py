"""A bar for long work: shown on a screen, nothing elsewhere.

One line of progress that replaces itself: a bar, how much, and how long it will take. Screens only.

A bar that counts bytes, with speed and time left: on screens only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specrun.cli.terminal.table import duration_text
from specrun.cli.terminal.terminal import Terminal


@contextmanager
def progress_bar(terminal: Terminal, first: str) -> Iterator[Callable[[str, float], None]]:
    """Yield what shows a step and the share that is done; `first` is shown until it is called."""
    if terminal.quiet or not terminal.notes_on_screen:
        yield lambda _what, _share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    console = Console(stderr=True, no_color=not terminal.color_notes, highlight=False)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=1.0)

        def report(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        yield report


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
        self._terminal.passing(
            f"{self._what} [{bar}] {100 * share:.0f} %, {duration_text(left)} left"
        )

    def close(self) -> None:
        """Take the line away."""
        self._terminal.passing("")


@contextmanager
def byte_progress(terminal: Terminal, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what shows the bytes done and the bytes in all; nothing is shown where nobody would see
    it."""
    if terminal.quiet or not terminal.notes_on_screen:
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, no_color=not terminal.color_notes, highlight=False)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report
