"""How the commands of `specrun bench` print their results: a table, Markdown, CSV or JSON, on
stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from specrun.cli.options.group import option, option_group
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.bench.table import Table

_WIDEST = 1000
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
    option(
        "-o",
        "--output",
        section="Output",
        type=click.Choice(["table", "md", "csv", "json"]),
        show_default="table on a terminal, md into a file or pipe",
        help="Form of the results; csv and json have all figures.",
    ),
    option("--json", "as_json", section="Output", is_flag=True, help="Short for -o json."),
)


def print_results(
    kind: str,
    results: Sequence[Any],
    form: OutputForm,
    make_table: Callable[[], Table],
    terminal: Terminal,
) -> None:
    """Write the results to stdout in the form that was asked for."""
    from specrun.bench.report import CONSTANT_COLUMNS, machine_facts
    from specrun.bench.table import to_csv, to_json, to_markdown

    if form == "csv":
        terminal.answer(to_csv(results))
    elif form == "json":
        terminal.answer(to_json(kind, machine_facts(), results))
    elif form == "md":
        terminal.answer(to_markdown(make_table()))
    else:
        _print_table(make_table().folded(CONSTANT_COLUMNS), terminal)


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
