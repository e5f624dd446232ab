"""Tables, sizes and durations as text, and progress of long work on the screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from specrun.cli.terminal.terminal import Terminal, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, ProgressColumn, Task, TaskID


# == Tables on stdout, framed on a screen and aligned text in a pipe ===============================


def print_facts(terminal: Terminal, title: str, facts: Mapping[str, str]) -> None:
    """Print names with their values; values are shown as text, never as markup."""
    print_table(terminal, title, ("", ""), list(facts.items()))


def print_table(
    terminal: Terminal, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print rows below a title; an empty `head` is left out."""
    safe = [[one_line(cell, 2000) for cell in row] for row in rows]
    if terminal.answers_on_screen:
        _print_framed(terminal, title, head, safe)
        return
    shown = [list(head), *safe] if any(head) else safe
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    terminal.answer("\n".join([f"{title}:", *(f"  {line}" for line in lines)]) + "\n")


def _print_framed(
    terminal: Terminal, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title,
        title_justify="left",
        box=box.ROUNDED,
        show_header=any(head),
        title_style="bold",
    )
    for index, name in enumerate(head):
        table.add_column(Text(name), style="cyan" if index == 0 else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(no_color=not terminal.color_answers, highlight=False).print(table)


def count_text(count: int) -> str:
    """Return a count with three digits or so: 36.5k, 6.30M, 1.24B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def bytes_text(n_bytes: int) -> str:
    """Return a size in binary units: 512 B, 13.9 MiB, 4.07 GiB."""
    amount = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:,.2f} TiB"


def duration_text(seconds: float) -> str:
    """Return a duration to the second: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# == Progress: bars of rich, and a line that replaces itself =======================================
#
# Nothing is shown with --quiet, or if stderr is no terminal.


_WIDTH = 24
_ALMOST = 0.99  # the most of a bar that time alone fills


@contextmanager
def screen_bar(
    terminal: Terminal,
    columns: Callable[[], Sequence[ProgressColumn]],
    *,
    transient: bool = True,
    below: Callable[[], str] = lambda: "",
) -> Iterator[Progress | None]:
    """Yield a bar of rich with these columns, which are only made for a screen; otherwise None.

    `below` returns the lines below the bar.
    """
    if terminal.quiet or not terminal.notes_on_screen:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    class Bar(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            yield from super().get_renderables()
            if below():
                yield Text(below())

    console = Console(stderr=True, no_color=not terminal.color_notes, highlight=False)
    with Bar(*columns(), console=console, transient=transient) as bar:
        yield bar


class Pace:
    """The share of a work's time that is over, and the seconds left, also between two reports.

    The share never falls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._share, self._told = 0.0, clock()
        self._left: float | None = None

    def tell(self, share: float, left: float | None) -> None:
        """Take a report."""
        self._share = max(self.share, share)
        self._left, self._told = left, self._clock()

    @property
    def left(self) -> float | None:
        """The seconds left, None if they are unknown."""
        if self._left is None:
            return None
        return max(0.0, self._left - (self._clock() - self._told))

    @property
    def share(self) -> float:
        """The share of the time that is over; not all of it before that is reported."""
        left = self.left
        if left is None or not self._left:
            return self._share
        return min(1.0 - (1.0 - self._share) * left / self._left, max(self._share, _ALMOST))


class Report(Protocol):
    """Shows a step of some work."""

    def __call__(self, what: str, share: float, left: float | None = None, /) -> None:
        """Show a step, the share done, and the seconds left if they are known."""


@contextmanager
def progress_bar(terminal: Terminal, first: str) -> Iterator[Report]:
    """Yield a function that shows a step below a bar; `first` is the step until then.

    The first seconds left that are known are shown in a line. With them the bar goes on by itself
    between two reports.
    """
    pace, step = Pace(), first

    def columns() -> list[ProgressColumn]:
        from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn
        from rich.text import Text

        class TimeLeft(ProgressColumn):
            """Shows the time left, and moves the bar meanwhile."""

            max_refresh = 0.5

            def render(self, task: Task) -> Text:
                """Return the time left as text, nothing if it is unknown."""
                task.completed = pace.share
                return Text("" if pace.left is None else f"about {duration_text(pace.left)} left")

        percentage = TextColumn("{task.percentage:3.0f} %")
        return [BarColumn(_WIDTH), percentage, TimeElapsedColumn(), TimeLeft()]

    # The step has a line of its own: a long one does not make the bar shorter.
    with screen_bar(terminal, columns, below=lambda: step) as bar:
        task = None if bar is None else bar.add_task("", total=1.0)

        def report(what: str, share: float, left: float | None = None, /) -> None:
            nonlocal step
            if left is not None and pace.left is None:
                terminal.note(f"this takes about {duration_text(left)}")
            step = what
            pace.tell(share, left)
            if bar is not None and task is not None:
                bar.update(task, completed=pace.share)

        yield report


@contextmanager
def byte_progress(terminal: Terminal, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the bytes done and in all, with speed and time left."""
    with _byte_bar(terminal) as report:
        yield lambda done, total: report(what, done, total)


@contextmanager
def fetch_progress(terminal: Terminal) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows the bytes of one file after the other; else a line each."""
    told: set[str] = set()
    with _byte_bar(terminal) as report:

        def show(what: str, done: int, total: int) -> None:
            if what not in told and not what.startswith("checking "):
                told.add(what)
                rest = f" ({bytes_text(done)} are there)" if done else ""
                terminal.note(f"fetching {one_line(what)}, {bytes_text(total)}{rest}")
            report(one_line(what, 60), done, total)

        yield show


@contextmanager
def _byte_bar(terminal: Terminal) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a name, the bytes done and in all, speed and time left."""

    def columns() -> list[ProgressColumn]:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        text = TextColumn("{task.description}", markup=False)
        size = DownloadColumn(binary_units=True)
        return [text, BarColumn(), size, TransferSpeedColumn(), TimeRemainingColumn()]

    with screen_bar(terminal, columns) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if bar is None:
                return
            if what not in tasks:
                for earlier in tasks.values():
                    bar.update(earlier, visible=False)
                tasks[what] = bar.add_task(what, total=total, completed=done)
            bar.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def progress_line(terminal: Terminal, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the amounts done and in all in a line with a bar."""
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        share = done / total if total else 1.0
        full = round(_WIDTH * share)
        left = (time.monotonic() - started) * (1 - share) / share if share > 0 else 0.0
        bar = "=" * full + " " * (_WIDTH - full)
        terminal.passing(f"{what} [{bar}] {100 * share:.0f} %, {duration_text(left)} left")

    with terminal.meanwhile():
        yield show
