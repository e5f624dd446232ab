"""Results of `specrun bench` on stdout: a table, Markdown, CSV or JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from specrun.cli.options.group import OUTPUT, option_group
from specrun.cli.options.output import json_option
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.bench.report import Table

_WIDEST = 1000
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
    json_option("Short for -o json."),
)


def measure_and_print(
    kind: str,
    measure: Callable[[Callable[[str], None]], Iterable[Result]],
    make_table: Callable[[Sequence[Result]], Table],
    form: OutputForm,
    terminal: Terminal,
) -> Sequence[Result]:
    """Run `measure`, which is given what shows its steps; print and return its results."""
    from specrun.bench.report import machine_facts, to_csv, to_json

    try:
        results = list(measure(lambda what: terminal.passing(f"{what} ...")))
    finally:
        terminal.passing("")
    if form == "csv":
        terminal.answer(to_csv(results))
    elif form == "json":
        terminal.answer(to_json(kind, machine_facts(), results))
    else:
        print_table(make_table(results), form, terminal)
    return results


def print_table(table: Table, form: OutputForm, terminal: Terminal) -> None:
    """Print a table as Markdown, or as one that fits a screen."""
    from specrun.bench.report import CONSTANT_COLUMNS, to_markdown

    if form == "md":
        terminal.answer(to_markdown(table))
    else:
        _print_table(table.folded(CONSTANT_COLUMNS), terminal)


def _print_table(table: Table, terminal: Terminal) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=sys.stdout, no_color=not terminal.color_answers, highlight=False)
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
    # On a narrow screen the terminal wraps the lines: cells cut short would lose what was measured.
    needed = console.measure(shown, options=console.options.update(max_width=_WIDEST)).maximum
    shown.width = needed
    console.print(shown, crop=False, soft_wrap=True, width=max(needed, console.width))
    for note in table.notes:
        console.print(Text(note, "yellow" if note.startswith("Advice") else "dim"))


def _style(cell: str) -> str:
    if cell == "same" or cell.endswith("within"):
        return "green"
    return "yellow" if cell.endswith("over") or "differ" in cell else ""
