"""Records: what was measured, by which command, where and when; one JSON file each.

The figures of a record are the results that a command printed as JSON, or, for measurements that
were made before there were records, a table as the documents had it. A record of a long
measurement grows piece by piece (`pieces`), so that it can be interrupted.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specrun.bench.report import Table
from specrun.bindings.errors import MalformedFileError
from specrun.bindings.files import atomic_path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "benchmarks"
_ALWAYS = ("title", "command", "date", "machine")
_DIGITS = 5
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """A measurement: `results` of a `kind` ("peers", ...), or a `table` of the documents.

    `pieces` maps the names of the parts that are there to the seconds that each took.
    """

    title: str
    command: str
    date: str
    machine: str
    commit: str = ""
    versions: str = ""
    conditions: str = ""
    notes: tuple[str, ...] = ()
    kind: str = ""
    pieces: Mapping[str, float] = field(default_factory=dict)
    results: tuple[Result, ...] = ()
    table: Table | None = None

    def with_piece(self, name: str, seconds: float, results: Sequence[Result]) -> Record:
        """Return the record with the results of one more piece, in place of older ones."""
        kept = [result for result in self.results if result["piece"] != name]
        added = [{"piece": name, **_rounded(result)} for result in results]
        pieces = {**self.pieces, name: round(seconds, 1)}
        return replace(self, pieces=pieces, results=(*kept, *added))

    @property
    def origin(self) -> str:
        """The sentence below a table: command, machine, day, commit, versions, conditions."""
        facts = [self.machine, self.date, self.commit and f"commit {self.commit}", self.versions]
        command = f"`{self.command}`: " if self.command else ""
        told = "; ".join(fact for fact in facts if fact)
        return f"{command}{told}.{f' {self.conditions}' if self.conditions else ''}"


def read_record(path: Path) -> Record:
    """Return a stored record; raises MalformedFileError if the file is none."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        table = body.pop("table", None)
        if table is not None:
            rows = tuple(tuple(map(str, row)) for row in table["rows"])
            table = Table(tuple(table["columns"]), rows)
            if any(len(row) != len(table.columns) for row in rows):
                raise ValueError("a row has more or fewer cells than there are columns")
        listed = {name: tuple(body.pop(name, ())) for name in ("notes", "results")}
        return Record(**body, **listed, table=table)
    except (ValueError, TypeError, KeyError) as error:
        raise MalformedFileError(f"{path} is no record of a measurement: {error}") from error


def read_records(folder: Path = FOLDER) -> dict[str, Record]:
    """Return all records of a folder, by name."""
    return {path.stem: read_record(path) for path in sorted(folder.glob("*.json"))}


def write_record(record: Record, path: Path) -> None:
    """Store a record, one result or row a line, so that differences can be read."""
    with atomic_path(path, force=True) as aside:
        aside.write_text("\n".join(_lines(record)) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the commit of this checkout, marked if files of it were changed."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty=+changes"]
    done = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _lines(record: Record) -> Iterator[str]:
    body = asdict(record)
    results, table = body.pop("results"), body.pop("table")
    known = {name: value for name, value in body.items() if value or name in _ALWAYS}
    parts = [f" {json.dumps(name)}: {_text(value)}" for name, value in known.items()]
    if results:
        rows = ",\n".join(f"  {_text(result)}" for result in results)
        parts.append(f' "results": [\n{rows}\n ]')
    if table is not None:
        rows = ",\n".join(f"   {_text(row)}" for row in table["rows"])
        columns = _text(table["columns"])
        parts.append(f' "table": {{\n  "columns": {columns},\n  "rows": [\n{rows}\n  ]\n }}')
    return iter(["{", ",\n".join(parts), "}"])


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _rounded(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return JSON with numbers of so many digits as a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
