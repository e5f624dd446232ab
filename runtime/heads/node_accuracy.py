"""Node accuracies of heads, by depth and rank: counted on a text, kept in the GGUF or in a CSV.

`accuracy[k][r]` is the share of positions at which the guess of rank r at depth k is the right
token, of those at which the right tokens of the depths above it were guessed too. So the product
along a path is the probability that the whole path is right, and the products of all paths of a
depth add up to the probability that any of them is.

In the head's GGUF: `<kind>.node_accuracy`, the rows one after another, and
`<kind>.node_accuracy_depths`, how many there are (as many as heads where it is absent). Beside it:
a CSV with the columns head, rank and accuracy, both numbers counted from 0; other columns are not
read.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import FileMissingError, MalformedFileError
from specrun.bindings.regular_file import open_regular
from specrun.runtime.heads.head_file import HeadFile

Accuracy = tuple[tuple[float, ...], ...]
"""Shares by depth and rank."""

KEY, DEPTHS_KEY = "node_accuracy", "node_accuracy_depths"
_COLUMNS = ("head", "rank", "accuracy")
_MAX_FILE = 1 << 20
_MAX_DEPTH, _MAX_RANK = 64, 1024
_ROUNDING = 1e-3  # shares of a head may add up to this much more than 1, as rounded numbers do


def stored_accuracy(file: HeadFile, n_heads: int | None = None) -> Accuracy | None:
    """Return the accuracies of a head's file, None if it has none; `n_heads` is for old files.

    Those do not say how many rows there are: one for each head. Raises MalformedFileError for
    numbers that are no shares, or that do not make so many rows.
    """
    numbers = file.numbers(KEY)
    if numbers is None:
        return None
    has_depths = f"{file.kind}.{DEPTHS_KEY}" in file.header.metadata
    depths = file.size(DEPTHS_KEY, _MAX_DEPTH) if has_depths or n_heads is None else n_heads
    ranks, rest = divmod(len(numbers), depths)
    if rest or not ranks or not all(0.0 <= number <= 1.0 for number in numbers):
        raise MalformedFileError(
            f"{file.path} has {len(numbers)} accuracies for {depths} heads: calibrate them again "
            "(specrun calibrate)"
        )
    return tuple(tuple(numbers[k * ranks : (k + 1) * ranks]) for k in range(depths))


def read_accuracy_csv(path: str | os.PathLike[str], n_depths: int | None = None) -> Accuracy:
    """Return the accuracies of a CSV file, for at most `n_depths` heads.

    Raises MalformedFileError that names the line for all that is no share by head and rank.
    """
    name = os.fspath(path)
    reader = csv.reader(_text(name).splitlines())
    rows: dict[int, dict[int, float]] = {}
    try:
        head = [column.strip().lower() for column in next(reader, [])]
        if any(column not in head for column in _COLUMNS):
            columns = ", ".join(_COLUMNS)
            raise _BadLine(f"the columns {columns} are missing: name them in the first line")
        places = [head.index(column) for column in _COLUMNS]
        for cells in reader:
            if any(cell.strip() for cell in cells):
                _add(rows, cells, places, n_depths)
        if not rows:
            raise _BadLine("no accuracy is given")
    except csv.Error as error:
        raise _fault(name, reader.line_num, f"it is not CSV ({error})") from error
    except _BadLine as error:
        raise _fault(name, max(1, reader.line_num), str(error)) from None
    return tuple(tuple(row[rank] for rank in range(len(row))) for _, row in sorted(rows.items()))


class _BadLine(Exception):
    """What is wrong with the line that was read last."""


def _fault(name: str, line: int, problem: str) -> MalformedFileError:
    return MalformedFileError(f"{name}, line {line}: {problem}")


def _text(name: str) -> str:
    try:
        with open_regular(name) as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise FileMissingError(
            f"{name} cannot be read ({error.strerror}): name a CSV file of accuracies"
        ) from error
    if len(data) > _MAX_FILE:
        raise MalformedFileError(
            f"{name} is larger than {_MAX_FILE >> 20} MiB: it is no table of accuracies"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _fault(name, line, "it is not UTF-8 text") from error


def _add(
    rows: dict[int, dict[int, float]],
    cells: Sequence[str],
    places: Sequence[int],
    n_depths: int | None,
) -> None:
    """Add a line's accuracy; heads and ranks must count up from 0."""
    if len(cells) <= max(places):
        raise _BadLine(f"it has {len(cells)} cells")
    head = _count(cells[places[0]], "head", _MAX_DEPTH)
    rank = _count(cells[places[1]], "rank", _MAX_RANK)
    share = _share(cells[places[2]])
    if n_depths is not None and head >= n_depths:
        raise _BadLine(f"head {head} of a file with {n_depths} heads, counted from 0")
    own = rows.setdefault(head, {})
    if rank in own:
        raise _BadLine(f"head {head} has a rank {rank} already")
    if rank != len(own):
        before = f"rank {rank} of head {head} comes before its rank {len(own)}"
        raise _BadLine(f"{before}: list them in order")
    if head and head - 1 not in rows:
        raise _BadLine(f"head {head} comes before head {head - 1}: list them in order")
    own[rank] = share
    total = sum(own.values())
    if total > 1.0 + _ROUNDING:
        sums = f"the accuracies of head {head} add up to {total:.3g}"
        raise _BadLine(f"{sums}: only one guess can be right")


def _count(cell: str, column: str, limit: int) -> int:
    text = cell.strip()
    # Nine digits at most: int() of a long text takes a long time.
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < limit):
        raise _BadLine(f"{column} is {text[:20]!r}: give a whole number from 0 to {limit - 1}")
    return int(text)


def _share(cell: str) -> float:
    text = cell.strip()
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise _BadLine(f"accuracy is {text[:20]!r}: give a share from 0 to 1")
    return share


Counts = npt.NDArray[np.int64]


class RankCounts:
    """Counts at which rank the right token was among the guesses of each depth."""

    def __init__(self, depths: int, ranks: int) -> None:
        self.n_positions = 0
        self._alone: Counts = np.zeros((depths, ranks), np.int64)
        self._below: Counts = np.zeros((depths, ranks), np.int64)
        self._asked: Counts = np.zeros(depths, np.int64)
        self._reached: Counts = np.zeros(depths, np.int64)

    def add(self, guesses: Sequence[Sequence[int]], right: Sequence[int]) -> None:
        """Count one position: the tokens of each depth, and the tokens that came."""
        self.n_positions += 1
        on_path = True
        # On the path, all tokens above were guessed: `below` is
        # conditional on that, `alone` is not.
        for depth, (tokens, token) in enumerate(zip(guesses, right, strict=False)):
            self._asked[depth] += 1
            self._reached[depth] += on_path
            rank = next((place for place, guess in enumerate(tokens) if guess == token), None)
            if rank is not None and rank < self._alone.shape[1]:
                self._alone[depth, rank] += 1
                self._below[depth, rank] += on_path
            else:
                on_path = False

    @property
    def accuracy(self) -> Accuracy:
        """Shares by depth and rank, of the positions where all tokens above were guessed."""
        return _shares(self._below, self._reached)

    @property
    def alone(self) -> Accuracy:
        """Shares by depth and rank, of all positions."""
        return _shares(self._alone, self._asked)

    @property
    def n_asked(self) -> tuple[int, ...]:
        """At how many positions each depth had a token to guess."""
        return tuple(self._asked.tolist())

    @property
    def n_reached(self) -> tuple[int, ...]:
        """At how many positions the tokens above each depth were guessed."""
        return tuple(self._reached.tolist())


def _shares(counts: Counts, totals: Counts) -> Accuracy:
    # A depth that was never reached has no share: 0 and not 0 / 0.
    shares = counts / np.maximum(totals, 1)[:, None]
    return tuple(tuple(row) for row in shares.tolist())
