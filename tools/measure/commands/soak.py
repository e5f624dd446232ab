"""`measure soak`: one process that answers for as long as it is told, and meets faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from specrun.cli.bench.command import OutputForm, format_options, measure_and_print
from specrun.cli.options.group import Section, SectionedCommand
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import MAX_COUNT
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from measure.serve.soak import ServeSoakResult
    from measure.soak.soak import SoakResult

_SOAK = Section("Soak")
_EPILOG = """\b
Tiny float32 models are written into a temporary folder. Sessions follow each other with random drafters,
acceptance rules, prompts and settings; answers are cancelled, dropped, interrupted, their evaluations fail,
runtimes are closed under them. Every answer has to be a fresh session's, and memory, handles and threads
have to stay flat: anything else is a failure, with the session that repeats it (--first), and exit status 1.
With --parallel one engine is asked for waves of answers, some of which are cancelled or dropped.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@_SOAK.option(
    "--minutes",
    "How long; Ctrl-C ends it sooner, with its report.",
    click.FloatRange(0.0, 60.0 * 24 * 365, min_open=True),
    default=5.0,
)
@_SOAK.option("--seed", "What all is drawn from.", click.IntRange(0, MAX_COUNT), default=0)
@_SOAK.option(
    "--first", "Begin with this session, to repeat it.", click.IntRange(0, MAX_COUNT), default=0
)
@_SOAK.option("--sessions", "Hold no more than these.", click.IntRange(1, MAX_COUNT))
@_SOAK.option(
    "--parallel N",
    "Conversations at a time, of one engine; 1 holds sessions, one after the other.",
    click.IntRange(1, 64),
    default=1,
)
@format_options
@terminal_options
def soak(
    minutes: float,
    seed: int,
    first: int,
    sessions: int | None,
    parallel: int,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Answer for hours, with faults: no answer may differ, nothing may grow."""
    from measure.soak.engine_soak import soak_engine
    from measure.soak.soak import SoakOptions
    from measure.soak.soak import soak as hold_sessions
    from measure.tables import soak_table

    options = SoakOptions(60.0 * minutes, seed, first, sessions)

    def measure(say: Callable[[str], None]) -> list[SoakResult]:
        if parallel > 1:
            return [soak_engine(options, parallel, progress=say)]
        return [hold_sessions(options, progress=say)]

    (result,) = measure_and_print("soak", measure, soak_table, form, terminal)
    end_soak(result, terminal)


def end_soak(result: SoakResult | ServeSoakResult, terminal: Terminal) -> None:
    """Say what failed and what grew; the command fails where anything did."""
    for failure in result.failures:
        terminal.error(failure)
    for growth in result.growth:
        if not growth.is_flat:
            terminal.error(f"{growth.name} grew from {growth.before:,.0f} to {growth.after:,.0f}")
    if not result.passed:
        click.get_current_context().exit(1)
