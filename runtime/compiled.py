"""Inner loops of laws in C (compiled.c), where there was a compiler when specrun was installed.

Whoever uses a loop has the same in Python beside it: both give the same bits, and a law of a few
dozen tokens is not worth a numpy call for every step.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

MOST_RANKED = 256
"""The most entries that `Loops.top_k` finds."""


class Loops(Protocol):
    """The functions of compiled.c, over contiguous arrays; their docstrings say what they do."""

    def top_k(self, row: npt.NDArray[np.float32], ids: Ids, values: Numbers) -> float:
        """Find the highest of a row."""

    def cut(
        self,
        ids: Ids,
        values: Numbers,
        masses: Numbers,
        share: float,
        lowest: float,
        temperature: float,
    ) -> int:
        """Order what truncation leaves of ranked tokens by id."""

    def scale_to_one(self, weights: Numbers) -> float:
        """Divide by the sum, unless that is not positive."""

    def place_at(self, probs: Numbers, uniform: float) -> int:
        """Return the place at a number of the cumulative law."""

    def race(self, probs: Numbers, ids: Ids | None, key: int) -> int:
        """Return the place of the token that arrives first."""

    def align(self, probs: Numbers, ids: Ids, tokens: Ids, out: Numbers) -> None:
        """Write the probabilities of tokens."""


def _load() -> Loops | None:
    try:
        return cast(Loops, importlib.import_module("specrun.runtime._compiled"))
    except ImportError:
        return None


LOOPS = _load()
"""The loops, None where they were not compiled."""
