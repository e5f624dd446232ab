"""`specrun bench lookup`: microseconds of a round of prompt lookup and REST, by the length of the
context."""

from __future__ import annotations

from pathlib import Path

import click

from specrun.cli.bench.output import OutputForm, format_options, print_results
from specrun.cli.options.group import SectionedCommand, option
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import CountListType, ExistingFile
from specrun.cli.terminal.terminal import Terminal

_SECTION = "Measurement"
_EPILOG = """\b
No model is evaluated: the drafters propose and observe over a text whose passages come back with some tokens
changed. Their time does not depend on the length of the context, only indexing a prompt does, once.
With --store, rest retrieves from your datastore, asked with passages of it.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@option(
    "--context",
    section=_SECTION,
    type=CountListType(),
    multiple=True,
    default=("100,4000,100000",),
    show_default=True,
    help="Tokens of context: a,b or repeated.",
)
@option(
    "--rounds",
    section=_SECTION,
    type=click.IntRange(1, 10**6),
    default=500,
    show_default=True,
    help="Rounds.",
)
@option("--store", section=_SECTION, type=ExistingFile(), help="A datastore to retrieve from.")
@format_options
@terminal_options
def lookup(
    context: tuple[tuple[int, ...], ...],
    rounds: int,
    store: Path | None,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Show what retrieving drafts costs a round."""
    from specrun.bench.lookup import LookupOptions, measure_lookup
    from specrun.bench.report import lookup_table

    sizes = tuple(dict.fromkeys(size for sizes in context for size in sizes))
    options = LookupOptions(contexts=sizes, rounds=rounds, store=store)
    try:
        results = list(
            measure_lookup(options, progress=lambda what: terminal.passing(f"{what} ..."))
        )
    finally:
        terminal.passing("")
    print_results("lookup", results, form, lambda: lookup_table(results), terminal)
