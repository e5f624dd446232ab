"""A bar that counts bytes, with speed and time left: on screens only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specrun.cli.terminal import Terminal

__all__ = ["byte_progress"]


@contextmanager
def byte_progress(terminal: Terminal, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what shows the bytes done and the bytes in all; nothing is shown where nobody would see it."""
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
