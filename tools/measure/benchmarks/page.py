"""docs/benchmarks.md: written from its template and the records, never by hand.

A line `{table NAME}` of the template becomes the table of that record, with its origin below it;
`{pictures NAME}` becomes a picture for light and dark pages, if it was drawn. All prose is the
template's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from measure.benchmarks.plan import command_of
from measure.benchmarks.records import FOLDER, Record, read_records
from measure.benchmarks.summaries import summary
from specrun.bench.report import Table, to_markdown
from specrun.bindings.errors import OptionError
from specrun.bindings.files import atomic_path

PAGE = FOLDER.with_suffix(".md")
TEMPLATE = FOLDER / "page.md"
THEMES = ("light", "dark")
_WRITTEN = (
    "<!-- Written by `make benchmarks` from docs/benchmarks: change the template or the records "
    "there. -->\n\n"
)
_MARK = re.compile(r"^\{(table|pictures) ([\w-]+)\}$", re.MULTILINE)


def page_text(folder: Path = FOLDER) -> str:
    """Return the page that the template and records of a folder make."""
    records = read_records(folder)
    own = folder / TEMPLATE.name
    template = (own if own.exists() else TEMPLATE).read_text(encoding="utf-8")
    used = {name for kind, name in _MARK.findall(template) if kind == "table"}
    unused = sorted(set(records) - used)
    if unused:
        raise OptionError(f"{TEMPLATE.name} shows no table of {', '.join(unused)}")

    def replaced(mark: re.Match[str]) -> str:
        kind, name = mark.groups()
        return _table(name, records) if kind == "table" else _picture(name, folder)

    return _WRITTEN + re.sub(r"\n{3,}", "\n\n", _MARK.sub(replaced, template))


def write_page(folder: Path = FOLDER) -> Path:
    """Write the page beside its folder; return its path."""
    page = folder.with_suffix(".md")
    text = page_text(folder)
    with atomic_path(page, force=True) as aside:
        aside.write_text(text, encoding="utf-8")
    return page


def picture_file(folder: Path, name: str, theme: str) -> Path:
    """Return the file of a picture for pages of a theme."""
    return folder / f"{name}-{theme}.svg"


def _table(name: str, records: Mapping[str, Record]) -> str:
    """Return a record's table in Markdown, or how it is measured if it was not."""
    record = records.get(name)
    if record is None:
        return f"*Not measured yet: `{command_of(name)}`.*"
    table = record.table if record.table is not None else summary(record)
    told = Table(table.columns, table.rows, (*table.notes, *record.notes, f"*{record.origin}*"))
    return f"**{record.title}**\n\n{to_markdown(told)}".rstrip("\n")


def _picture(name: str, folder: Path) -> str:
    light, dark = (picture_file(folder, name, theme) for theme in THEMES)
    if not (light.exists() and dark.exists()):
        return ""
    here = f"{folder.name}/"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{here}{dark.name}">'
        f'<img alt="{name.replace("-", " ")}" src="{here}{light.name}"></picture>'
    )
