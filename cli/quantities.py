"""Large numbers and durations as people read them."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "duration_text"]


def count_text(count: int) -> str:
    """Return a count with three digits or so: 36.5k, 6.30M, 1.24B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def bytes_text(n_bytes: int) -> str:
    """Return a size in binary units: 512 B, 13.9 MiB, 4.07 GiB."""
    amount = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:,.2f} TiB"


def duration_text(seconds: float) -> str:
    """Return a duration to the second: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
