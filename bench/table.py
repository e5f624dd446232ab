"""Results as data: tables with their notes, and Markdown, CSV and JSON made of them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """Named columns, rows of texts, and what a reader has to know about them.

    `constants` are columns that had one value throughout (see `folded`).
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]], *notes: str) -> Table:
        """Return the table of rows that all have the same columns, by name."""
        records = list(rows)
        columns = tuple(records[0]) if records else ()
        return cls(columns, tuple(tuple(record.values()) for record in records), notes)

    def folded(self, names: Iterable[str]) -> Table:
        """Return the table without those of the named columns that are the same in every row."""
        wanted = set(names)
        gone: dict[int, str] = {}
        for index, name in enumerate(self.columns):
            values = {row[index] for row in self.rows}
            if name in wanted and len(values) == 1:
                gone[index] = values.pop()

        def kept(cells: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(cell for index, cell in enumerate(cells) if index not in gone)

        constants = tuple((self.columns[index], value) for index, value in gone.items())
        return Table(kept(self.columns), tuple(map(kept, self.rows)), self.notes, constants)


def to_markdown(table: Table) -> str:
    """Return a Markdown table, its columns aligned, followed by the notes."""
    cells = [[_escaped(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(table.columns))]
    right = [_is_numeric(table, index) for index in range(len(table.columns))]
    lines = [_line(row, widths, right) for row in cells]
    marks = ["-" * (width - flag) + ":" * flag for width, flag in zip(widths, right, strict=True)]
    lines.insert(1, _line(marks, widths, right))
    if table.constants:
        lines.insert(0, ", ".join(f"{name} {value}" for name, value in table.constants) + "\n")
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)]) + "\n"


def to_csv(results: Sequence[Any]) -> str:
    """Return dataclasses as CSV; nested fields are columns such as `tokens_per_second_median`."""
    records = [_flat(dataclasses.asdict(result)) for result in results]
    names = _column_names(records)
    output = io.StringIO()
    writer = csv.DictWriter(output, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return output.getvalue()


def to_json(kind: str, machine: Mapping[str, Any], results: Sequence[Any]) -> str:
    """Return one JSON object: what was measured, on what machine, and the results (dataclasses)."""
    records = [dataclasses.asdict(result) for result in results]
    content = {"bench": kind, "machine": dict(machine), "results": records}
    return json.dumps(content, indent=2) + "\n"


def _column_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all names but those that are None in some results and nested fields in others."""
    names = list(dict.fromkeys(name for record in records for name in record))

    def is_nested(name: str) -> bool:
        empty = all(record.get(name) is None for record in records)
        return empty and any(column.startswith(f"{name}_") for column in names)

    return [name for name in names if not is_nested(name)]


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}_"))
        elif isinstance(value, list | tuple):
            flat[f"{prefix}{name}"] = " ".join(f"{item:.6g}" for item in value)
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _is_numeric(table: Table, index: int) -> bool:
    filled = [row[index] for row in table.rows if row[index] != "-"]
    return bool(filled) and all(cell[:1].isdigit() for cell in filled)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if flag else cell.ljust(width)
        for cell, width, flag in zip(cells, widths, right, strict=True)
    ]
    return f"| {' | '.join(padded)} |"
