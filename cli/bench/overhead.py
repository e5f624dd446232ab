"""`specrun bench overhead`: Python time per round by component, beside the time in native
evaluation."""

from __future__ import annotations

import click

from specrun.cli.bench.output import OutputForm, format_options, print_results
from specrun.cli.options.group import SectionedCommand, option
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import CountListType
from specrun.cli.terminal.terminal import Terminal

_SECTION = "Measurement"
_EPILOG = """\b
Random models of almost no width are written into a temporary folder, so that nearly all that is
left of a round is specrun's own work. The parts are timed from outside the shipped loop, which
runs as it always does, garbage collection included. The budgets are those of specrun's design:
250 us for a greedy chain of 5 and 600 us for a sampled tree of 16 nodes, with a vocabulary of up to 32,768 tokens
and a context of up to 4,096 tokens; twice that for up to 131,072.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@option(
    "--vocab",
    section=_SECTION,
    type=CountListType(),
    multiple=True,
    default=("32000,128000",),
    show_default=True,
    help="Vocabulary sizes: a,b or repeated.",
)
@option(
    "-c",
    "--ctx",
    "--ctx-size",
    section=_SECTION,
    type=click.IntRange(128, 2**20),
    default=4096,
    show_default=True,
    help="Context size: each change of the cache walks all of it.",
)
@option(
    "--rounds",
    section=_SECTION,
    type=click.IntRange(1, 10**6),
    default=300,
    show_default=True,
    help="Rounds that are counted for each setting, after a tenth as many that are not.",
)
@option(
    "-t",
    "--threads",
    section=_SECTION,
    type=click.IntRange(0, 1024),
    default=0,
    show_default="one a core",
    help="Threads of native evaluation.",
)
@format_options
@terminal_options
def overhead(
    vocab: tuple[tuple[int, ...], ...],
    ctx: int,
    rounds: int,
    threads: int,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Show what a round costs in Python, part by part, beside native evaluation."""
    from specrun.bench.overhead.overhead import OverheadOptions, measure_overhead
    from specrun.bench.report import overhead_table

    sizes = tuple(dict.fromkeys(size for sizes in vocab for size in sizes))
    options = OverheadOptions(
        vocab_sizes=sizes, n_ctx=ctx, rounds=rounds, warm_up=max(1, rounds // 10), n_threads=threads
    )
    try:
        results = list(
            measure_overhead(options, progress=lambda what: terminal.passing(f"{what} ..."))
        )
    finally:
        terminal.passing("")
    print_results("overhead", results, form, lambda: overhead_table(results), terminal)
