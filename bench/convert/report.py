"""The table of `specrun bench convert` for readers."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bench.convert.measurement import ConvertResult
from specrun.bench.table import Table
from specrun.bench.timing import Ratio, Spread


def convert_table(results: Sequence[ConvertResult]) -> Table:
    """Return the table, with what a reader has to know about it."""
    columns = (
        "what",
        "read",
        "written",
        "seconds",
        "MB/s read",
        "of baseline",
        "peak memory",
        "budget",
    )
    rows = tuple(_row(result) for result in results)
    notes = [
        f"Medians of {max((result.seconds.n for result in results), default=0)} interleaved "
        "repetitions (least to most). "
        "Every time ends when the data is on the disk; sources are in the page cache where there "
        "is room. "
        "Memory: the largest resident set of a process that does nothing else, Python included."
    ]
    notes += [f"{result.name}: {result.note}" for result in results if result.note]
    return Table(columns, rows, tuple(notes))


def _row(result: ConvertResult) -> tuple[str, ...]:
    return (
        result.name,
        _megabytes(result.n_bytes_in),
        _megabytes(result.n_bytes_out),
        _spread(result.seconds, 1.0, 2),
        _spread(result.bandwidth, 1e6, 0),
        "-" if result.of_baseline is None else f"{_ratio(result.of_baseline)} of {result.baseline}",
        "-" if result.peak_bytes is None else _megabytes(result.peak_bytes),
        _budget(result),
    )


def _budget(result: ConvertResult) -> str:
    parts = []
    if result.budget is not None:
        parts.append(f"{result.budget:g} of {result.baseline}")
    if result.peak_budget is not None:
        parts.append(_megabytes(result.peak_budget))
    if result.within_budget is None:
        return "-"
    return f"{', '.join(parts)}: {'within' if result.within_budget else 'over'}"


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes < 1e8 else f"{n_bytes / 1e6:,.0f} MB"


def _spread(spread: Spread, unit: float, digits: int) -> str:
    middle = f"{spread.median / unit:,.{digits}f}"
    return (
        middle
        if spread.n == 1
        else f"{middle} ({spread.low / unit:,.{digits}f}-{spread.high / unit:,.{digits}f})"
    )


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
