"""The table of `specrun bench convert` for readers."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bench.convert.measurement import ConvertResult
from specrun.bench.table import Table
from specrun.bench.timing import Ratio, Spread


def convert_table(results: Sequence[ConvertResult]) -> Table:
    """Return the table, with what a reader has to know about it."""
    columns = ("what", "read", "written", "seconds", "MB/s read", "of baseline", "peak memory", "budget")
    rows = tuple(_row(one) for one in results)
    notes = [
        f"Medians of {max((one.seconds.n for one in results), default=0)} interleaved repetitions (least to most). "
        "Every time ends when the data is on the disk; sources are in the page cache where there is room. "
        "Memory: the largest resident set of a process that does nothing else, Python included."
    ]
    notes += [f"{one.name}: {one.note}" for one in results if one.note]
    return Table(columns, rows, tuple(notes))


def _row(one: ConvertResult) -> tuple[str, ...]:
    return (
        one.name,
        _megabytes(one.n_bytes_in),
        _megabytes(one.n_bytes_out),
        _spread(one.seconds, 1.0, 2),
        _spread(one.bandwidth, 1e6, 0),
        "-" if one.of_baseline is None else f"{_ratio(one.of_baseline)} of {one.baseline}",
        "-" if one.peak_bytes is None else _megabytes(one.peak_bytes),
        _budget(one),
    )


def _budget(one: ConvertResult) -> str:
    parts = []
    if one.budget is not None:
        parts.append(f"{one.budget:g} of {one.baseline}")
    if one.peak_budget is not None:
        parts.append(_megabytes(one.peak_budget))
    if one.within_budget is None:
        return "-"
    return f"{', '.join(parts)}: {'within' if one.within_budget else 'over'}"


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes < 1e8 else f"{n_bytes / 1e6:,.0f} MB"


def _spread(spread: Spread, unit: float, digits: int) -> str:
    middle = f"{spread.median / unit:,.{digits}f}"
    return middle if spread.n == 1 else f"{middle} ({spread.low / unit:,.{digits}f}-{spread.high / unit:,.{digits}f})"


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
