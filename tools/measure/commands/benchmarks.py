"""`python tools/measure benchmarks`: the page of benchmarks, and what is measured for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.bindings.errors import SpecrunError
from specrun.cli.options.group import Section, SectionedCommand, option_group
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import PATH
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from measure.benchmarks.plan import Planned

_MEASURING = Section("Measurement")
_SETS = ("real", "counted", "missing", "gpu")

_EPILOG = """\b
Examples:
  python tools/measure benchmarks                               # writes docs/benchmarks.md
  python tools/measure benchmarks --measure real --list         # what there is to measure
  python tools/measure benchmarks --measure real --minutes 30   # as much of it as fits
  python tools/measure benchmarks --measure counted --only nodes --again
  python tools/measure benchmarks --measure gpu --minutes 10
  python tools/measure benchmarks --measure gpu --shape tiny --folder trial --anyway

\b
Each piece is stored when it is there, in docs/benchmarks, and the next call goes on behind it.
real: published models beside llama.cpp's server and llama-cpp-python; counted: tokens a round,
for which any machine will do; missing: rows that nobody has measured yet; gpu: a GPU in ten
minutes. Timed pieces need a quiet machine. Then the page is written, with its pictures; with
--folder another folder has records, page.md and pictures, and the page lies beside it.
"""


@dataclass(frozen=True, slots=True)
class _Measuring:
    """What is measured before the page is written."""

    measure: str | None
    only: tuple[str, ...]
    minutes: float
    again: bool
    list: bool
    anyway: bool
    shape: str
    folder: Path | None


_measuring_options = option_group(
    "measuring",
    _Measuring,
    _MEASURING.option("--measure SET", "Measure what is missing of a set.", click.Choice(_SETS)),
    _MEASURING.option("--only NAME", "Records of the set alone; repeatable.", multiple=True),
    _MEASURING.option(
        "--minutes N",
        "Time for this call; pieces that do not fit wait.",
        click.FloatRange(0.0, 1e5),
        default=30.0,
    ),
    _MEASURING.flag("--again", "Measure everything of the set anew."),
    _MEASURING.flag("--list", "Show the records, their pieces and estimates, and end."),
    _MEASURING.option(
        "--shape NAME",
        "The shape of the models with random weights for a GPU.",
        click.Choice(["8b", "1b", "8x1b", "tiny"]),
        default="8b",
    ),
    _MEASURING.option(
        "--folder FOLDER", "Records of a trial.", PATH, show_default="docs/benchmarks"
    ),
    _MEASURING.flag("--anyway", "Measure although other programs are busy; records say so."),
)


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@_measuring_options
@terminal_options
def benchmarks(measuring: _Measuring, terminal: Terminal) -> None:
    """Write docs/benchmarks.md from its records; measure what is missing."""
    from measure.benchmarks.measurement import measure_planned
    from measure.benchmarks.page import write_page
    from measure.benchmarks.pictures import draw_pictures
    from measure.benchmarks.plan import planned, plans
    from measure.benchmarks.records import FOLDER

    folder = measuring.folder or FOLDER
    failed: list[str] = []
    if measuring.measure is None and (measuring.only or measuring.again or measuring.list):
        raise click.UsageError("--only, --again and --list are for --measure")
    if measuring.measure is not None:
        chosen = [each for each in plans(measuring.shape) if each.set == measuring.measure]
        if measuring.only:
            chosen = [planned(name, measuring.shape) for name in measuring.only]
        if measuring.again and not measuring.list:
            for each in chosen:
                (folder / f"{each.name}.json").unlink(missing_ok=True)
        _show_estimates(chosen, measuring.minutes, folder, terminal)
        if measuring.list:
            return
        failed = measure_planned(
            chosen, measuring.minutes, anyway=measuring.anyway, say=terminal.note, folder=folder
        )
        for reason in failed:
            terminal.warn(reason)
    drawn = draw_pictures(folder)
    page = write_page(folder)
    terminal.note(f"written: {page}, {len(drawn)} pictures")
    if failed:
        raise SpecrunError(f"{len(failed)} pieces could not be measured")


def _show_estimates(
    chosen: list[Planned], minutes: float, folder: Path, terminal: Terminal
) -> None:
    """Show what is missing of each record, and how long it takes."""
    from measure.benchmarks.measurement import missing_pieces, record_of

    total = 0.0
    for record in chosen:
        missing = missing_pieces(record, record_of(record, folder))
        seconds = sum(each for _, each in missing)
        total += seconds
        state = f"{len(missing)} of {len(record.pieces)} pieces, about {seconds / 60:,.0f} minutes"
        terminal.note(f"{record.name:22} {state if missing else 'measured'}")
    terminal.note(f"in all about {total / 60:,.0f} minutes; this call has {minutes:g}")
