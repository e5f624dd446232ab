"""A training run as it is shown: checks before it, its progress, curves, GGUF, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specrun.bindings.errors import SpecrunError
from specrun.cli.options.output import check_plot
from specrun.cli.terminal.screen import duration_text, print_facts, screen_bar
from specrun.cli.terminal.terminal import Terminal
from specrun.cli.train.options import TrainJob, TrainResult

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from specrun.convert.conversion import ConversionReport
    from specrun.train.trainer import Recipe, TrainingReport, TrainingRun, TrainingStatus

Run = TypeVar("Run", bound="TrainingRun")
Report = TypeVar("Report", bound="TrainingReport")

_WAITING = "reading"
_BAR_WIDTH = 24


class ShownRun:
    """A listener (`specrun.train.trainer.learner.RunListener`) that shows a run."""

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
    """Yield a listener that shows a run; the bar is on screens only."""

    def columns() -> list[ProgressColumn]:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn

        text = TextColumn("{task.description}", markup=False)
        return [BarColumn(bar_width=_BAR_WIDTH), TaskProgressColumn(), text]

    with screen_bar(terminal, columns) as bar:
        yield ShownRun(terminal, bar)


def measures_text(measures: Mapping[str, float]) -> str:
    """Return measures in a line; first and fifth ranks of a head together: head 1 71/92 %."""
    parts: list[str] = []
    for name, value in measures.items():
        if name.endswith(" top-1"):
            five = measures.get(name[:-1] + "5")
            share = f"{100 * value:.0f}" if five is None else f"{100 * value:.0f}/{100 * five:.0f}"
            parts.append(f"{name.removesuffix(' top-1')} {share} %")
        elif not name.endswith(" top-5"):
            parts.append(f"{name} {value:.3g}")
    return ", ".join(parts)


# == Before and after the run ======================================================================


def check_result(result: TrainResult) -> Path | None:
    """Return the file of the curves, None without matplotlib and without --plot.

    Raises before the training the errors of places and types that would come after it.
    """
    from specrun.bindings.files import check_target
    from specrun.convert.conversion import known_type
    from specrun.convert.quantize import HEAD_TYPE  # noqa: F401 - the extra that converting needs

    check_plot(result.plot)
    known_type(result.outtype)
    if result.gguf is not None:
        check_target(result.gguf, force=result.force)
    if result.plot is not None:
        return result.plot
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    return result.output.expanduser() / "training" / "curves.png"


def trained(
    job: TrainJob,
    recipe: Recipe[Run, Report],
    run: Run,
    plot: Path | None,
    title: str,
    convert: Callable[..., ConversionReport],
    *,
    what: str,
) -> tuple[Report, dict[str, Path | None]]:
    """Train, draw the curves and convert the folder; return the report and the files written."""
    from specrun.train.trainer import train

    with shown_run(job.terminal) as shown:
        report = train(recipe, run, shown)
    if plot is not None:
        from specrun.bench.plots import plot_training

        plot_training(report.result.curves, plot, f"{title} for {run.target.resolve().name}")
    result, gguf = job.result, None
    if result.gguf is not None:
        settings = {"outtype": result.outtype, "force": result.force}
        try:
            gguf = convert(run.output, result.gguf, **settings).output
        except SpecrunError as error:
            error.add_note(f"the trained {what} is whole: convert it with specrun convert")
            raise
    return report, {"gguf": gguf, "plot": plot}


def print_report(
    job: TrainJob,
    kind: str,
    report: TrainingReport,
    files: Mapping[str, Path | None],
    *,
    shown: Mapping[str, str],
    counts: Mapping[str, Any],
    measures: Mapping[str, Any],
) -> None:
    """Print the report: `shown` as facts, or with --json `counts` and `measures`."""
    losses, result = report.result.curves.losses, report.result
    if job.terminal.as_json:
        facts = {
            "output": str(report.output),
            "kind": kind,
            **{name: path and str(path) for name, path in files.items()},
            "parameters": report.n_trained,
            "sequences": report.n_sequences,
            **counts,
            "steps": len(losses),
            "tokens": result.tokens,
            "seconds": result.seconds,
            "loss": losses[-1] if losses else None,
            **measures,
            "precision": report.precision,
            "device": report.device,
        }
        job.terminal.answer_json(facts)
        return
    lines = {
        "folder": str(report.output),
        "parameters": f"{report.n_trained:,}",
        "trained": f"{len(losses):,} steps, {result.tokens:,} tokens, {result.seconds:,.0f} s",
        "on": f"{report.device}, {report.precision}",
        "loss": f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "-",
        **shown,
    }
    for name, file in (("curves", "plot"), ("GGUF", "gguf")):
        if files[file] is not None:
            lines[name] = str(files[file])
    print_facts(job.terminal, f"{kind} trained", lines)
