"""`specrun bench convert`: how fast checkpoints are converted, and in how much memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from specrun.bindings.errors import FileMissingError
from specrun.cli.bench.output import OutputForm, format_options, print_results
from specrun.cli.options.group import SectionedCommand, option
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import ParametersType
from specrun.cli.terminal.terminal import Terminal

_SECTION = "Measurement"
_EPILOG = """\b
A checkpoint is made up in a temporary folder, three times as much space is needed, and everything
is removed afterwards. The budgets are those of specrun's design: converting to F16 reaches half of
the bandwidth of a plain copy, within 2 GB of memory beyond the largest tensor; quantizing 0.9 of the
speed of llama.cpp's own call, within 1.2 of its memory.

\b
--only: checkpoint (to F16), quantize (F16 to Q4_K_M), imatrix (summing over plain evaluation).
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@option(
    "--size",
    section=_SECTION,
    type=ParametersType(),
    metavar="BYTES",
    default="1.1G",
    show_default=True,
    help="Bytes of the checkpoint that is made: 20M, 4G, ...",
)
@option(
    "-r",
    "--repetitions",
    section=_SECTION,
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="How often everything is measured.",
)
@option(
    "--only",
    section=_SECTION,
    multiple=True,
    metavar="NAME",
    show_default="everything",
    help="Measure only this; may be repeated.",
)
@option(
    "--folder",
    section=_SECTION,
    type=click.Path(path_type=Path),
    show_default="the system's for temporary files",
    help="Measure on the disk of this folder.",
)
@option(
    "-t",
    "--threads",
    section=_SECTION,
    type=click.IntRange(0, 512),
    default=0,
    show_default="one a core",
    help="Threads of native work.",
)
@format_options
@terminal_options
def convert(
    size: int,
    repetitions: int,
    only: tuple[str, ...],
    folder: Path | None,
    threads: int,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Measure conversion: bandwidth beside a plain copy, and peak memory."""
    from specrun.bench.convert.measurement import ConvertOptions, measure
    from specrun.bench.report import convert_table

    if folder is not None and not folder.is_dir():
        raise FileMissingError(f"there is no folder {folder}; create it first")
    with tempfile.TemporaryDirectory(prefix="specrun-bench-", dir=folder) as place:
        options = ConvertOptions(size, repetitions, threads, Path(place))
        try:
            results = list(measure(only, options, lambda what: terminal.passing(f"{what} ...")))
        finally:
            terminal.passing("")
    print_results("convert", results, form, lambda: convert_table(results), terminal)
