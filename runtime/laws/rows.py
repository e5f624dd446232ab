"""Loops over a row of logits: its highest entries, and sums of its exponentials.

They are in C if there was a compiler when specrun was installed, else in numpy. The highest
entries are equal to the bit. Sums round otherwise: they decide thresholds of rules that are not
exact, and no draw.
"""

from __future__ import annotations

import importlib
import math
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Sums = tuple[float, float, float]

MOST_RANKED = 256
"""The most entries that are ranked in C."""

_LOWEST = -87.0  # exp of it is the least normal float32: nothing that counts in a sum


class RowLoops(Protocol):
    """The functions in C; their docstrings and their equals below name their results."""

    def rank(
        self,
        row: Logits,
        ids: npt.NDArray[np.intp],
        values: npt.NDArray[np.float64],
        ordered: npt.NDArray[np.float64],
        start: int,
    ) -> bool:
        """See `rank_in_numpy`."""

    def favourite(self, row: Logits) -> int:
        """See `favourite_in_numpy`."""

    def log_mass(self, row: Logits) -> Sums:
        """See `log_mass_in_numpy`."""


def _load() -> RowLoops | None:
    if np.dtype(np.intp).itemsize != 8:
        return None  # ids are read as numbers of 64 bits
    try:
        return cast(RowLoops, importlib.import_module("specrun.runtime.laws._rows"))
    except ImportError:
        return None


_LOOPS = _load()


def rank_in_numpy(
    row: npt.NDArray[np.floating],
    ids: npt.NDArray[np.intp],
    values: npt.NDArray[np.float64],
    ordered: npt.NDArray[np.float64],
    start: int,
) -> bool:
    """Find the len(ordered) highest entries, of equals those of lower ids.

    Writes their ids, ascending, and how far each is from the highest, both from place `start` on,
    and these values in descending order. Returns False, and nothing is written, if the highest is
    not finite or there is a NaN.
    """
    highest, k = float(row[row.argmax()]), len(ordered)  # the first of equals, if signs of 0 differ
    if not math.isfinite(highest):
        return False
    least = np.partition(row, len(row) - k)[len(row) - k]
    above, equal = (row > least).nonzero()[0], (row == least).nonzero()[0]
    places = slice(start, start + k)
    ids[places] = np.sort(np.concatenate([above, equal[: k - len(above)]]))
    values[places] = row[ids[places]].astype(np.float64) - highest
    ordered[:] = values[places][np.argsort(-values[places], kind="stable")]
    return True


def favourite_in_numpy(row: npt.NDArray[np.floating]) -> int:
    """Return the place of the highest entry, of equals the first; -1 as `rank` returns False."""
    place = int(row.argmax())
    return place if math.isfinite(row[place]) else -1


def log_mass_in_numpy(row: npt.NDArray[np.floating]) -> Sums:
    """See `log_mass`."""
    highest = float(np.maximum.reduce(row, initial=-math.inf))
    # A token without mass has a logit of -inf, and 0 log 0 counts as 0.
    shifted = np.maximum(row - highest, _LOWEST)
    powers = np.exp(shifted)
    return highest, float(powers.sum()), float((shifted * powers).sum())


def log_mass(row: npt.NDArray[np.floating]) -> Sums:
    """Return the highest entry, and of x = entry - highest the sums of exp(x) and x exp(x)."""
    if _LOOPS is None or row.dtype != np.float32:
        return log_mass_in_numpy(row)
    return _LOOPS.log_mass(cast(Logits, row))


rank = rank_in_numpy if _LOOPS is None else _LOOPS.rank
favourite = favourite_in_numpy if _LOOPS is None else _LOOPS.favourite
