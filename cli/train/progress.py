"""Progress of a training run: a bar with loss, speed and time left, and lines of measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specrun.cli.terminal.screen import duration_text, screen_bar
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from specrun.train.trainer import TrainingStatus

_WAITING = "reading"
_BAR_WIDTH = 24


class ShownRun:
    """Hears how a run goes (as `specrun.train.trainer.learner.RunListener`) and shows it."""

    def __init__(self, terminal: Terminal, bar: Progress | None) -> None:
        self._terminal, self._bar = terminal, bar
        self._task = bar.add_task(_WAITING, total=None) if bar is not None else None
        self._measured: Mapping[str, float] | None = None

    def note(self, text: str) -> None:
        """Write a fact on a line of its own."""
        if self._bar is not None:
            self._bar.console.print(text, style="dim", markup=False, soft_wrap=True)
        else:
            self._terminal.note(text)

    def stage(self, what: str, done: int, total: int) -> None:
        """Show how far work before the training is."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what, completed=done, total=total)

    def status(self, status: TrainingStatus) -> None:
        """Show how far the training is; new measures get a line that stays."""
        if status.measures is not self._measured and status.measures:
            self._measured = status.measures
            self.note(
                f"step {status.step:,}: loss {status.loss:.3f}, {measures_text(status.measures)}"
            )
        if self._bar is not None and self._task is not None:
            speed = (
                f"{status.tokens_per_second:,.0f} tok/s, {duration_text(status.seconds_left)} left"
            )
            text = f"step {status.step:,}/{status.steps:,} loss {status.loss:.3f}, {speed}"
            self._bar.update(
                self._task, description=text, completed=status.step, total=status.steps
            )


@contextmanager
def shown_run(terminal: Terminal) -> Iterator[ShownRun]:
    """Yield what shows a run; the bar is on screens only."""

    def columns() -> list[ProgressColumn]:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn

        text = TextColumn("{task.description}", markup=False)
        return [BarColumn(bar_width=_BAR_WIDTH), TaskProgressColumn(), text]

    with screen_bar(terminal, columns) as bar:
        yield ShownRun(terminal, bar)


def measures_text(measures: Mapping[str, float]) -> str:
    """Return measures in a line; first and fifth ranks of a head stand together: head 1 71/92 %."""
    parts: list[str] = []
    for name, value in measures.items():
        if name.endswith(" top-1"):
            five = measures.get(name[:-1] + "5")
            share = f"{100 * value:.0f}" if five is None else f"{100 * value:.0f}/{100 * five:.0f}"
            parts.append(f"{name.removesuffix(' top-1')} {share} %")
        elif not name.endswith(" top-5"):
            parts.append(f"{name} {value:.3g}")
    return ", ".join(parts)
