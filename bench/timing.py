"""Repeated measurements: their time, their order, spreads of values, ratios to a baseline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import OptionError

_GAIN = 1.02  # from which a speed-up is worth a word
_MOST_LATE = 0.1  # of all seconds, by which a piece of work may end late

Progress = Callable[[str, float, float], None]
"""Takes the current step, the share of the time that is over, and the seconds left."""


class Budget:
    """Seconds for several pieces of work. A piece that would end too late does not begin.

    `ahead` are seconds of work with a time of its own, such as training, in addition.
    """

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.perf_counter, ahead: float = 0.0
    ) -> None:
        self.seconds, self._clock, self.ahead = seconds, clock, ahead
        self._began = clock()
        self._ends = self._began + seconds
        self._share = 0.0

    @property
    def left(self) -> float:
        """The seconds left, without those ahead; 0 after the end."""
        return max(0.0, self._ends - self._clock())

    def has(self, seconds: float) -> bool:
        """Whether work of so many seconds may begin: most of it must fit."""
        late = min(0.5 * seconds, _MOST_LATE * self.seconds)
        return seconds - late <= self.left

    def take_ahead(self, seconds: float) -> None:
        """End the work ahead, which took so long."""
        self._ends += seconds
        self.ahead = 0.0

    def progress(self, at_most: float | None = None) -> tuple[float, float]:
        """Return the share of the time that is over, which never falls, and the seconds left.

        `at_most` are the seconds of the work that is left, if it may end before its time.
        """
        left = self.ahead + (self.left if at_most is None else min(self.left, at_most))
        spent = self._clock() - self._began
        share = spent / (spent + left) if left > 0.0 else 1.0
        self._share = max(self._share, share)
        return self._share, left


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity that was measured `n` times; `sd` is 0 for a single measurement."""

    n: int
    median: float
    mean: float
    sd: float
    low: float
    lower_quartile: float
    upper_quartile: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """How two measured quantities compare: the median of the ratios within one repetition.

    There both were measured under nearly the same conditions. `low` and `high` are the extremes.
    """

    value: float
    low: float
    high: float

    @property
    def extent(self) -> str:
        """The extremes as shown behind the value: "(0.97-1.08)"."""
        return f"({self.low:.2f}-{self.high:.2f})"


def speed_verdict(drafter: str, texts: str, ratio: Ratio) -> str:
    """Return a sentence: is a drafter faster? A range that spans 1 is no gain."""
    low, value, high = (_times(each) for each in (ratio.low, ratio.value, ratio.high))
    extent = f" ({low} to {high})" if low != high else ""
    if ratio.low > 1.0 and ratio.value >= _GAIN:
        return f"Drafting with {drafter} makes {texts} about {value} times as fast{extent}."
    if ratio.high < 1.0:
        slower = f"about {value} times the speed of plain decoding{extent}"
        return f"Drafting with {drafter} makes {texts} slower: {slower}."
    nothing = f"{value} times the speed of plain decoding{extent}"
    return f"Drafting with {drafter} does not make {texts} measurably faster: {nothing}."


def _times(ratio: float) -> str:
    """Return a ratio with as many digits as show whether it is above or below 1."""
    return f"{ratio:.1f}" if abs(ratio - 1.0) >= 0.15 else f"{ratio:.2f}"


def spread_of(values: Sequence[float]) -> Spread:
    """Return median, mean, standard deviation, extremes and quartiles of at least one value."""
    if not values:
        raise OptionError("nothing was measured: there is no median of no values")
    lower, upper = np.quantile(values, (0.25, 0.75)).tolist()
    return Spread(
        n=len(values),
        median=statistics.median(values),
        mean=statistics.fmean(values),
        sd=statistics.stdev(values) if len(values) > 1 else 0.0,
        low=min(values),
        lower_quartile=lower,
        upper_quartile=upper,
        high=max(values),
    )


def ratio_of(values: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return how `values` compare with a `baseline` that was measured in the same repetitions."""
    if not values or len(values) != len(baseline):
        raise OptionError(
            f"{len(values)} values cannot be compared with {len(baseline)} of the baseline"
        )
    pairs = [value / base for value, base in zip(values, baseline, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def require_given(settings: object, lists: Sequence[str], counts: Sequence[str] = ()) -> None:
    """Raise `OptionError` if one of these fields is empty, or one of these counts below 1."""
    for name in lists:
        if not getattr(settings, name):
            raise OptionError(f"no {name} are given: there is nothing to measure")
    for name in counts:
        if getattr(settings, name) < 1:
            raise OptionError(f"{name} is {getattr(settings, name)}: give at least 1")


def interleaved(n_arms: int, repetitions: int) -> Iterator[tuple[int, int]]:
    """Yield (repetition, arm): every repetition visits every arm, every other one backwards.

    A machine that grows warmer or busier then slows all arms alike, not the last one.
    """
    for repetition in range(repetitions):
        arms = range(n_arms)
        for arm in arms if repetition % 2 == 0 else reversed(arms):
            yield repetition, arm
