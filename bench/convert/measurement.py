"""What every measurement of `specrun bench convert` is given, and what it finds.

The table of what `specrun bench convert` can measure: a name, and where it is. To add one, add a
file and a line.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specrun.bench.timing import Ratio, Spread
from specrun.bindings.errors import OptionError
from specrun.convert.names import nearest

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """`n_bytes` is how large a checkpoint is made, in `folder`, which is emptied afterwards by
    whoever made it."""

    n_bytes: int
    repetitions: int
    n_threads: int
    folder: Path

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise OptionError(f"{self.repetitions} repetitions: give at least 1")


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """One row: `seconds` for reading `n_bytes_in` and writing `n_bytes_out`, both on the disk at
    the end.

    `bandwidth` is bytes read a second. `of_baseline` compares it with `baseline`'s in the same
    repetitions; `budget` is what it should reach. `peak_bytes` is the most memory of a process that
    did nothing else, `peak_budget` what that should stay below. None: not measured, or no budget.
    """

    name: str
    n_bytes_in: int
    n_bytes_out: int
    seconds: Spread
    bandwidth: Spread
    baseline: str | None = None
    of_baseline: Ratio | None = None
    budget: float | None = None
    peak_bytes: int | None = None
    peak_budget: int | None = None
    note: str = ""

    @property
    def within_budget(self) -> bool | None:
        """Whether every budget is kept; None where there is none."""
        kept = []
        if self.budget is not None and self.of_baseline is not None:
            kept.append(self.of_baseline.value >= self.budget)
        if self.peak_budget is not None and self.peak_bytes is not None:
            kept.append(self.peak_bytes <= self.peak_budget)
        return all(kept) if kept else None


class Measurement(Protocol):
    """A thing to measure: yields its rows."""

    def __call__(self, options: ConvertOptions, progress: Progress) -> Iterator[ConvertResult]:
        """Measure, saying through `progress` what is under way."""
        ...


MEASUREMENTS = {
    "checkpoint": "specrun.bench.convert.checkpoint_to_f16",
    "quantize": "specrun.bench.convert.model_to_q4_k_m",
    "imatrix": "specrun.bench.convert.importance_overhead",
}
"""The names, in the order they are measured, and the modules whose function `measure` does it."""


def measure(
    names: Sequence[str], options: ConvertOptions, progress: Progress
) -> Iterator[ConvertResult]:
    """Yield the rows of the named measurements, of all where none is named; raises OptionError for
    an unknown one."""
    for name in names:
        if name not in MEASUREMENTS:
            raise OptionError(f"there is no measurement {name!r}{nearest(name, MEASUREMENTS)}")
    for name, module in MEASUREMENTS.items():
        if name in names or not names:
            found: Measurement = importlib.import_module(module).measure
            yield from found(options, progress)
