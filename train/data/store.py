"""Records of a run that are expensive to make, kept as JSON Lines while they come.

An interrupted run reads its store, and makes only the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.files import DAMAGE

Progress = Callable[[int, int], None]
"""Called with the records done and all of them."""

Record = dict[str, Any]
T = TypeVar("T")


def kept_records(
    store: Path,
    keys: Sequence[str],
    made: Callable[[list[int]], Generator[tuple[int, Record]]],
    parse: Callable[[Record], T],
    *,
    what: str,
    progress: Progress | None = None,
) -> list[T]:
    """Return the record of each key, `parse`d; those that `store` lacks are made and added.

    `made` yields records with their numbers, in any order, for a list of numbers. `what` names a
    record in the MalformedFileError for a damaged store.
    """
    known = _read(store, parse, what)
    missing = [number for number, key in enumerate(keys) if key not in known]
    if missing:
        n_known = len(keys) - len(missing)
        with closing(made(missing)) as coming, store.open("a", encoding="utf-8") as file:
            for done, (number, record) in enumerate(coming, n_known + 1):
                known[keys[number]] = parse(record)
                file.write(json.dumps({"key": keys[number], **record}) + "\n")
                file.flush()
                if progress is not None:
                    progress(done, len(keys))
    return [known[key] for key in keys]


def _read(store: Path, parse: Callable[[Record], T], what: str) -> dict[str, T]:
    """Return the records of a store by key; a last line that was cut off is cut away."""
    if not store.exists():
        return {}
    data = store.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with store.open("r+b") as file:
            file.truncate(len(whole))
    found: dict[str, T] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            found[str(record["key"])] = parse(record)
        except DAMAGE as error:
            problem = f"line {number} of {store} is no {what}: remove it"
            raise MalformedFileError(problem) from error
    return found
