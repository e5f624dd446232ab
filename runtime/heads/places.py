# cython: annotation_typing=False, boundscheck=False, wraparound=False
"""The inputs of a head's graph: where its rows stand, in which cells, and the cells that they see.

Cython compiles this file if there is a compiler (`places.pxd` has the types), as after an
evaluation numpy's code is not in the processor's caches. All arrays are flat: a graph's own memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_IS_COMPILED = not __file__.endswith(".py")
_MASKED = -math.inf

Cells = memoryview
"""The numbers of a graph's input."""


def write_chain(
    positions: Cells,
    cells: Cells,
    mask: Cells,
    into: Cells,
    given: npt.NDArray[np.float32],
    position: int,
    count: int,
    seen: int,
    spare: int,
) -> None:
    """Write rows [n, width] that form a chain: the first at a position, in the cell `count`.

    Each sees the first `count` cells and those of the chain up to its own. Rows that only fill up
    are zeros in the spare cell. The mask, rows times cells, was written for a text of `seen` cells
    before; -1: not yet.
    """
    places, own, sees, values = _open(positions), _open(cells), _open(mask), _open(into)
    rows, n, width = len(places), len(given), given.shape[1]
    length = len(sees) // rows if rows else 0
    fits = len(own) == rows and len(sees) == rows * length and len(values) == rows * width
    if not (0 < rows >= n and fits and 0 <= count <= length):
        raise ValueError("the arrays of a chain's places do not fit one another")
    _write_rows(values, given)
    for row in range(rows):
        places[row] = position + row if row < n else 0
        own[row] = count + row if row < n else spare
    if seen < 0 or seen > count:
        sees[:] = _MASKED
        seen = 0
    end = min(length, count + 2 * rows)
    for row in range(rows):
        start = row * length
        visible = min(end, count + row + 1 if row < n else count)
        sees[start + seen : start + visible] = 0.0
        sees[start + visible : start + end] = _MASKED


def write_places(
    positions: Cells,
    cells: Cells,
    mask: Cells,
    tokens: Cells,
    into: Cells | None,
    given: npt.NDArray[np.float32] | None,
    at: Sequence[int],
    own: Sequence[int],
    named: Sequence[int],
    seen: int,
    sees: npt.NDArray[np.bool_],
    spare: int,
) -> None:
    """Write rows wherever they stand: row i, of the token named[i], at at[i] in the cell own[i].

    It sees the first `seen` cells, and those of sees[i] from there on. `given`, [n,
    width], goes into `into`, if they are not None. Rows that only fill up are zeros in the spare
    cell, and see the first one: of no cell a softmax is NaN.
    """
    places, held, all_seen, names = _open(positions), _open(cells), _open(mask), _open(tokens)
    rows, n, more = len(places), sees.shape[0], sees.shape[1]
    length = len(all_seen) // rows if rows else 0
    fits = len(held) == len(names) == rows and len(all_seen) == rows * length
    if not (0 < rows >= n and fits and seen >= 0 and seen + more <= length > 0):
        raise ValueError("the arrays of places do not fit one another")
    if not len(at) == len(own) == len(named) == n:
        raise ValueError("as many tokens as places are needed")
    if given is not None:
        values = _open(into)
        if len(given) != n or len(values) != rows * given.shape[1]:
            raise ValueError("the arrays of places do not fit one another")
        _write_rows(values, given)
    own_seen = sees.view(np.uint8)
    for row in range(rows):
        start = row * length
        if row >= n:
            places[row] = names[row] = 0
            held[row] = spare
            all_seen[start] = 0.0
            all_seen[start + 1 : start + length] = _MASKED
            continue
        places[row], names[row], held[row] = at[row], named[row], own[row]
        all_seen[start : start + seen] = 0.0
        all_seen[start + seen : start + length] = _MASKED
        for column in range(more):
            if own_seen[row, column]:
                all_seen[start + seen + column] = 0.0


def write_below(
    positions: Cells,
    cells: Cells,
    own: Cells,
    depths: Cells,
    places: Cells,
    root: int,
    first: int,
    length: int,
) -> None:
    """Write rows of a tree below a root at a position, in the cells from `first` on.

    Row i is at depths[i], the place places[i] of its depth, whose mask has so many cells a row;
    `own` becomes the place of its cell there.
    """
    at, held, marks = _open(positions), _open(cells), _open(own)
    below, among = _open(depths), _open(places)
    n = len(at)
    if not len(held) == len(marks) == len(below) == len(among) == n:
        raise ValueError("the arrays of a tree's places do not fit one another")
    for row in range(n):
        at[row] = root + below[row]
        held[row] = first + row
        marks[row] = among[row] * length + first + row


def _open(numbers: Any) -> Any:  # noqa: ANN401 - an array, or a view in C
    """Return numbers as loops write them: interpreted ones write spans of an array at once."""
    return numbers if _IS_COMPILED else np.asarray(numbers)


def _write_rows(into: npt.NDArray[np.float32], given: npt.NDArray[np.float32]) -> None:
    """Write rows, and zeros behind them: the rest of an earlier round there may be anything."""
    flat = given.reshape(-1)
    into[: len(flat)] = flat
    into[len(flat) :] = 0.0
