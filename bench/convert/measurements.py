"""The table of what `specrun bench convert` can measure: a name, and where it is. To add one, add a file and a line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from specrun.bench.convert.measurement import ConvertOptions, ConvertResult, Measurement, Progress
from specrun.bindings.errors import OptionError
from specrun.convert.names import nearest

__all__ = ["MEASUREMENTS", "measure"]

MEASUREMENTS = {
    "checkpoint": "specrun.bench.convert.checkpoint_to_f16",
    "quantize": "specrun.bench.convert.model_to_q4_k_m",
    "imatrix": "specrun.bench.convert.importance_overhead",
}
"""The names, in the order they are measured, and the modules whose function `measure` does it."""


def measure(names: Sequence[str], options: ConvertOptions, progress: Progress) -> Iterator[ConvertResult]:
    """Yield the rows of the named measurements, of all where none is named; raises OptionError for an unknown one."""
    for name in names:
        if name not in MEASUREMENTS:
            raise OptionError(f"there is no measurement {name!r}{nearest(name, MEASUREMENTS)}")
    for name, module in MEASUREMENTS.items():
        if name in names or not names:
            found: Measurement = importlib.import_module(module).measure
            yield from found(options, progress)
