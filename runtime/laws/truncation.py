# cython: annotation_typing=False, boundscheck=False, cdivision=True
"""Truncation: what top-k, top-p and min-p leave of a row, and its probabilities by temperature.

This file is compiled by Cython where there is a compiler (`truncation.pxd` has the types), and
interpreted elsewhere: both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from specrun.bindings.errors import DecodeFailedError
from specrun.runtime.laws.law import FloatArray, Law, scale_to_one
from specrun.runtime.laws.rows import Logits, rank, rank_in_numpy

Cuts = tuple[int, float, float, float]
"""The arguments of `law_of_row` behind the row."""

FAVOURITE: Cuts = (1, 1.0, -math.inf, 1.0)
"""Cuts that leave the token of the highest logit, of equals the lowest id."""


def require_finite(highest: float) -> None:
    """Raise `DecodeFailedError` unless the highest logit of a model's row is finite."""
    if not math.isfinite(highest):
        problem = f"the model gave logits of {highest}: the file or the backend is broken"
        raise DecodeFailedError(problem, -3)


def law_of_row(row: Logits, k: int, share: float, lowest: float, temperature: float) -> Law | None:
    """Return the distribution of the k highest entries of a row, cut further.

    Of the k highest, of equals the lower ids, the likeliest stay up to the one that brings their
    mass to `share` of all (1: all), and of these those no further than `lowest` below the highest.
    Returns None if the highest is not finite or there is a NaN.
    """
    k = min(k, len(row))
    id_array, value_array, ordered_array = np.empty(k, np.intp), np.empty(k), np.empty(k)
    # Rows are of 32 bits; tests bring others.
    find = rank if row.itemsize == 4 else rank_in_numpy
    if not find(row, id_array, value_array, ordered_array):
        return None
    ids, values, ordered = id_array, value_array, ordered_array
    count = _count_left(ordered, k, share, lowest)
    last, n_last, kept = ordered[count - 1], 0, 0
    for i in range(count):
        n_last += ordered[i] == last
    # In the order of their ids: of those that share the lowest value, the lower ids stay.
    for i in range(k):
        value = values[i]
        if value > last or (value == last and n_last > 0):
            n_last -= value == last
            ids[kept] = ids[i]
            values[kept] = math.exp(value / temperature)
            kept += 1
    probs = value_array[:count]
    scale_to_one(probs)
    return Law(probs, id_array[:count])


def _count_left(ordered: FloatArray, size: int, share: float, lowest: float) -> int:
    """Return how many of the entries, which descend from 0, top-p and min-p leave."""
    count = size
    if share < 1.0:
        total, reached = 0.0, 0.0
        for i in range(size):
            total += math.exp(ordered[i])
        wanted = share * total
        for i in range(size):
            reached += math.exp(ordered[i])
            if reached >= wanted:
                count = i + 1
                break
    while count > 1 and ordered[count - 1] < lowest:
        count -= 1
    return count


class RowLaws:
    """The distribution after each node of an evaluated tree: `law_of_row` of the node's row.

    `logits(0)` is the root's row, `logits(i + 1)` that of node i.
    """

    def __init__(self, logits: Callable[[int], Logits], cuts: Cuts) -> None:
        self._logits = logits
        self._k, self._share, self._lowest, self._temperature = cuts

    def __call__(self, node: int) -> Law:
        """Return the distribution after a node."""
        row = self._logits(node + 1)
        law = law_of_row(row, self._k, self._share, self._lowest, self._temperature)
        if law is None:
            require_finite(float(row.max()))
        return law
