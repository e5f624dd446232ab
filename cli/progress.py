"""A bar for long work: shown on a screen, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specrun.cli.terminal import Terminal

__all__ = ["progress_bar"]


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
