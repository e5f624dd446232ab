"""`specrun bench heads`: time of a head's evaluation beside the time of copying what it has to
read."""

from __future__ import annotations

import click

from specrun.cli.bench.output import OutputForm, format_options, print_results
from specrun.cli.options.group import SectionedCommand, option
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import CountListType
from specrun.cli.terminal.terminal import Terminal

_SECTION = "Measurement"
_EPILOG = """\b
Heads with random weights, and a target of one small layer, are written into a temporary folder
(with the defaults up to 1.1 GB at a time). Before every evaluation an array of 256 MiB is copied:
that measures the bandwidth, and leaves no weights in the caches.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@option(
    "--hidden",
    section=_SECTION,
    type=CountListType(),
    multiple=True,
    default=("512,4096",),
    show_default=True,
    help="Hidden sizes: a,b or repeated.",
)
@option(
    "--vocab",
    section=_SECTION,
    type=click.IntRange(16, 10**6),
    default=32_000,
    show_default=True,
    help="The size of the vocabulary, in tokens.",
)
@option(
    "--type",
    "type_name",
    section=_SECTION,
    type=click.Choice(["F32", "F16", "Q8_0"], case_sensitive=False),
    default="Q8_0",
    show_default=True,
    help="Type of the weights.",
)
@option(
    "--width",
    section=_SECTION,
    type=CountListType(),
    multiple=True,
    default=("1,4,8",),
    show_default=True,
    help="Paths in one evaluation of Hydra's head, pairs of EAGLE's.",
)
@option(
    "-r",
    "--repetitions",
    section=_SECTION,
    type=click.IntRange(1, 10**4),
    default=20,
    show_default=True,
    help="Evaluations that are timed for each row.",
)
@option(
    "-t",
    "--threads",
    section=_SECTION,
    type=click.IntRange(0, 512),
    default=0,
    show_default="one a core",
    help="Threads of the evaluation and of the copy.",
)
@format_options
@terminal_options
def heads(
    hidden: tuple[tuple[int, ...], ...],
    vocab: int,
    type_name: str,
    width: tuple[tuple[int, ...], ...],
    repetitions: int,
    threads: int,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Show what evaluating heads costs, beside the bytes that they have to read."""
    from specrun.bench.heads.measure import HEAD_TYPES, HeadsOptions, measure_heads
    from specrun.bench.report import heads_table

    options = HeadsOptions(
        hidden=tuple(dict.fromkeys(size for sizes in hidden for size in sizes)),
        vocab_size=vocab,
        type_name=next(known for known in HEAD_TYPES if known == type_name.upper()),
        widths=tuple(dict.fromkeys(size for sizes in width for size in sizes)),
        repetitions=repetitions,
        n_threads=threads,
    )
    try:
        results = list(
            measure_heads(options, progress=lambda what: terminal.passing(f"{what} ..."))
        )
    finally:
        terminal.passing("")
    print_results("heads", results, form, lambda: heads_table(results), terminal)
