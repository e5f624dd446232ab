"""A rule of one's own: a function from the drafter's law and the target's to the law pi."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.law_pair import LawPair, PairRule
from specrun.runtime.law import FloatArray, Law

LawFunction = Callable[[FloatArray, FloatArray], FloatArray]
"""From S(q) and S(p), the laws that tokens are drawn from, to pi: all [n_vocab], each sums to 1."""

_ROUNDING = 1e-6  # float32 functions are welcome


class UserRule(PairRule):
    """Emits what a function makes of both laws; `raw` laws are for subclasses of `PairRule`."""

    reads_raw_draft = False

    def __init__(self, name: str, function: LawFunction) -> None:
        self.name, self._function = name, function

    def law(self, pair: LawPair) -> Law:
        """Return the function's law; raises `OptionError` where it is none."""
        size = max(_size(pair.draft), _size(pair.target))
        dense = Law(np.zeros(size))
        probs = self._function(pair.draft.aligned_to(dense), pair.target.aligned_to(dense))
        return Law.normalised(self._checked(probs, size))

    def _checked(self, returned: object, size: int) -> FloatArray:
        probs = _numbers(returned)
        if probs is None:
            raise self._no_law(f"{type(returned).__name__} is no array of numbers")
        if probs.shape != (size,):
            raise self._no_law(f"an array of shape {probs.shape}, not ({size},)")
        total = float(probs.sum())
        if not np.isfinite(total):
            raise self._no_law("numbers that are not finite")
        lowest = float(probs.min())
        if lowest < 0.0:
            raise self._no_law(f"a probability of {lowest:g}")
        if abs(total - 1.0) > _ROUNDING:
            raise self._no_law(f"probabilities that sum to {total:g}")
        return probs

    def _no_law(self, what: str) -> OptionError:
        advice = "give probabilities of all tokens that sum to 1"
        return OptionError(f"the rule {self.name!r} returned no law, but {what}: {advice}")


def _numbers(returned: object) -> FloatArray | None:
    """Return what a function returned as an array, None where it is none."""
    try:
        probs = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return probs if probs.ndim else None


def _size(law: Law) -> int:
    return len(law.probs) if law.ids is None else int(law.ids[-1]) + 1
