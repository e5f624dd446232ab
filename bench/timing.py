"""Repeated measurements: their order, spreads of their values, and ratios to a baseline."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.bindings.errors import OptionError


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


def spread_of(values: Sequence[float]) -> Spread:
    """Return median, mean, standard deviation, extremes and quartiles of at least one value."""
    if not values:
        raise OptionError("nothing was measured: there is no median of no values")
    ordered = sorted(values)
    return Spread(
        n=len(ordered),
        median=statistics.median(ordered),
        mean=statistics.fmean(ordered),
        sd=statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        low=ordered[0],
        lower_quartile=_quantile(ordered, 0.25),
        upper_quartile=_quantile(ordered, 0.75),
        high=ordered[-1],
    )


def ratio_of(values: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return how `values` compare with a `baseline` that was measured in the same repetitions."""
    if not values or len(values) != len(baseline):
        raise OptionError(
            f"{len(values)} values cannot be compared with {len(baseline)} of the baseline"
        )
    pairs = [value / base for value, base in zip(values, baseline, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def interleaved(n_arms: int, repetitions: int) -> Iterator[tuple[int, int]]:
    """Yield (repetition, arm): every repetition visits every arm, every other one backwards.

    A machine that grows warmer or busier then slows all arms alike, not the last one.
    """
    for repetition in range(repetitions):
        arms = range(n_arms)
        for arm in arms if repetition % 2 == 0 else reversed(arms):
            yield repetition, arm


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile, between two values in proportion (`statistics.quantiles` needs two)."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
