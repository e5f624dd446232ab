"""Facts and tables on stdout: framed on a screen, plain aligned text in a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrun.cli.printable import one_line
from specrun.cli.terminal import Terminal

__all__ = ["print_facts", "print_table"]


def print_facts(terminal: Terminal, title: str, facts: Mapping[str, str]) -> None:
    """Print names with their values; values are shown as text, never as markup."""
    print_table(terminal, title, ("", ""), list(facts.items()))


def print_table(terminal: Terminal, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below a title; an empty `head` is left out."""
    safe = [[one_line(cell, 2000) for cell in row] for row in rows]
    if terminal.answers_on_screen:
        _print_framed(terminal, title, head, safe)
    else:
        _print_plain(terminal, title, head, safe)


def _print_plain(terminal: Terminal, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    shown = [list(head), *rows] if any(head) else list(rows)
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    terminal.answer("\n".join([f"{title}:", *(f"  {line}" for line in lines)]) + "\n")


def _print_framed(terminal: Terminal, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.ROUNDED, show_header=any(head), title_style="bold")
    for index, name in enumerate(head):
        table.add_column(Text(name), style="cyan" if index == 0 else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(no_color=not terminal.color_answers, highlight=False).print(table)
