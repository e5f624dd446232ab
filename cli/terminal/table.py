"""Tables on stdout, framed on a screen and aligned text in a pipe; counts, sizes, durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrun.cli.terminal.terminal import Terminal, one_line


def print_facts(terminal: Terminal, title: str, facts: Mapping[str, str]) -> None:
    """Print names with their values; values are shown as text, never as markup."""
    print_table(terminal, title, ("", ""), list(facts.items()))


def print_table(
    terminal: Terminal, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print rows below a title; an empty `head` is left out."""
    safe = [[one_line(cell, 2000) for cell in row] for row in rows]
    if terminal.answers_on_screen:
        _print_framed(terminal, title, head, safe)
    else:
        _print_plain(terminal, title, head, safe)


def _print_plain(
    terminal: Terminal, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    shown = [list(head), *rows] if any(head) else list(rows)
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    terminal.answer("\n".join([f"{title}:", *(f"  {line}" for line in lines)]) + "\n")


def _print_framed(
    terminal: Terminal, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title,
        title_justify="left",
        box=box.ROUNDED,
        show_header=any(head),
        title_style="bold",
    )
    for index, name in enumerate(head):
        table.add_column(Text(name), style="cyan" if index == 0 else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(no_color=not terminal.color_answers, highlight=False).print(table)


def count_text(count: int) -> str:
    """Return a count with three digits or so: 36.5k, 6.30M, 1.24B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def bytes_text(n_bytes: int) -> str:
    """Return a size in binary units: 512 B, 13.9 MiB, 4.07 GiB."""
    amount = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:,.2f} TiB"


def duration_text(seconds: float) -> str:
    """Return a duration to the second: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
