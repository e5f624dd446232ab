"""`specrun bench`: its measurements, and the options and results that they share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from specrun.cli.options.group import (
    OUTPUT,
    SAMPLING,
    Decorator,
    LazyCommand,
    LazyGroup,
    Section,
    option_group,
)
from specrun.cli.options.types import MAX_COUNT, PARAMETERS
from specrun.cli.terminal.screen import duration_text
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.bench.report import Table


# == The group =====================================================================================


_COMMANDS = (
    LazyCommand("specrun.cli.bench.drafters", "drafters", "Drafters against plain decoding."),
    LazyCommand(
        "specrun.cli.bench.cascade", "cascade", "Cascades of two models: quality for latency."
    ),
)

_EPILOG = """\b
Examples:
  specrun bench drafters --demo --pad-to 400M
  specrun bench drafters -m target.gguf -md small.gguf -f prompt.txt --temp 0,0.8
  specrun bench cascade --demo --pad-to 400M --plot cascades.png

\b
Measure on a machine that does nothing else: llama.cpp's threads wait for each other, and a
single busy program beside them makes every figure meaningless.
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def bench() -> None:
    "Measure the gain and the cost of drafting."


# == Results on stdout: a table, Markdown, CSV or JSON =============================================


Result = TypeVar("Result")
OutputForm = Literal["table", "md", "csv", "json"]


def _form(output: OutputForm | None, as_json: bool) -> OutputForm:
    if as_json and output not in (None, "json"):
        raise click.UsageError(f"--json and -o {output} exclude each other")
    if as_json:
        return "json"
    return output or ("table" if sys.stdout.isatty() else "md")


format_options = option_group(
    "form",
    _form,
    OUTPUT.option(
        "-o, --output",
        "Form of the results; csv and json have all figures.",
        click.Choice(["table", "md", "csv", "json"]),
        show_default="table on a terminal, md into a file or pipe",
    ),
    OUTPUT.flag("--json", "Short for -o json.", dest="as_json"),
)


def measure_and_print(
    kind: str,
    measure: Callable[[Callable[[str], None]], Iterable[Result]],
    make_table: Callable[[Sequence[Result]], Table],
    form: OutputForm,
    terminal: Terminal,
) -> Sequence[Result]:
    """Run `measure` with a function that shows its steps; print and return its results."""
    from specrun.bench.report import machine_facts, to_csv, to_json

    with terminal.meanwhile():
        results = list(measure(lambda what: terminal.passing(f"{what} ...")))
    if form == "csv":
        terminal.answer(to_csv(results))
    elif form == "json":
        terminal.answer(to_json(kind, machine_facts(), results))
    else:
        print_table(make_table(results), form, terminal)
    return results


class AnswerCount:
    """Shows how many answers are given, and about the time left by their rate."""

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._clock = terminal, clock
        self._done, self._began = 0, 0.0

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show a step behind so many answers; steps between answers give no count."""
        if not self._done:
            self._began = self._clock()
        self._done = max(self._done, done)
        left = ""
        if self._done:
            each = (self._clock() - self._began) / self._done
            left = f", about {duration_text(each * (total - self._done))} left"
        self._terminal.passing(f"{self._done} of {total} answers{left}: {what} ...")


def print_table(table: Table, form: OutputForm, terminal: Terminal) -> None:
    """Print a table as Markdown, or as one that fits a screen."""
    from specrun.bench.report import CONSTANT_COLUMNS, to_markdown

    if form == "md":
        terminal.answer(to_markdown(table))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    table = table.folded(CONSTANT_COLUMNS)
    console = Console(file=sys.stdout, no_color=not terminal.color_answers, highlight=False)
    for line in table.heading:
        console.print(Text(line, "bold"), soft_wrap=True)
    if table.constants:
        console.print(
            Text(" · ".join(f"{name} {value}" for name, value in table.constants), "bold")
        )
    shown = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold"
    )
    for name in table.columns:
        shown.add_column(Text(name), no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(cell, _style(cell)) for cell in row))
    # On a narrow screen the terminal wraps the lines: cells cut short would lose figures.
    needed = console.measure(shown, options=console.options.update(max_width=1000)).maximum
    shown.width = needed
    console.print(shown, crop=False, soft_wrap=True, width=max(needed, console.width))
    for note in table.notes:
        console.print(Text(note, "yellow" if note.startswith("Advice") else "dim"))


def _style(cell: str) -> str:
    if cell == "same" or cell.endswith("within"):
        return "green"
    return "yellow" if cell.endswith("over") or "differ" in cell else ""


# == Options of several benchmarks: how long, how often, on how costly a target ====================


first_seed_option = SAMPLING.option(
    "-s, --seed",
    "The seed of the first repetition. The others count on from it.",
    click.IntRange(0, 2**63),
    default=0,
)


def predict_option(
    section: Section, help: str = "The most tokens in an answer.", *, default: int
) -> Decorator:
    """Return `-n`, the tokens of an answer."""
    kind = click.IntRange(1, MAX_COUNT)
    return section.option("-n, --predict, --max-tokens", help, kind, default=default)


def repetitions_option(section: Section, help: str, default: int) -> Decorator:
    """Return `-r`, how often everything is answered."""
    return section.option("-r, --repetitions", help, click.IntRange(1, 10**6), default=default)


def padding_option(section: Section) -> Decorator:
    """Return `--pad-to`, the parameters of the target that is timed."""
    help = "Pad the target to the cost of N parameters (400M, 1B), with the same outputs."
    return section.option("--pad-to N", help, PARAMETERS)


@contextmanager
def timed_target(
    target: Path, pad_to: int | None, *, keep: Path | None = None, progress: Callable[[str], None]
) -> Iterator[Path]:
    """Yield the target of `--pad-to`, or `target` itself: only padding needs the package gguf."""
    if pad_to is None:
        yield target
        return
    from specrun.convert.cut.pad import padded_target

    with padded_target(target, pad_to, keep=keep, progress=progress) as padded:
        yield padded
