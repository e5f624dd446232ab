"""Resources of a soak: memory, handles and threads of this process, and whether they stay flat."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SLACK_BYTES = 8 << 20
_SLACK = 0.03
_LEAST = 100  # samples: until then processes still grow into what they do


@dataclass(frozen=True, slots=True)
class Resources:
    """A process at one moment: resident bytes, open files and handles, threads."""

    n_bytes: int
    n_handles: int
    n_threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A soak's second quarter, after all was warm, against its last: medians."""

    name: str
    before: float
    after: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        """Whether the growth is within what is allowed."""
        return self.after - self.before <= self.allowed


def read_resources() -> Resources:
    """Return what this process holds, garbage aside."""
    import psutil  # only a soak needs it

    gc.collect()
    process = psutil.Process()
    # Windows has handles, other systems file descriptors.
    count = "num_fds" if hasattr(process, "num_fds") else "num_handles"
    return Resources(
        process.memory_info().rss, int(getattr(process, count)()), process.num_threads()
    )


def growth_of(samples: Sequence[Resources]) -> tuple[Growth, ...]:
    """Compare the second quarter of the samples with the last; nothing for under 100 samples.

    Handles and threads may not grow at all. Memory may by 3 % and 8 MB: allocators keep what was
    freed in pieces.
    """
    if len(samples) < _LEAST:
        return ()
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def growth(name: str, read: Callable[[Resources], int], slack: float, least: float) -> Growth:
        before, after = (statistics.median(map(read, part)) for part in (early, late))
        return Growth(name, before, after, max(least, slack * before))

    return (
        growth("memory", lambda held: held.n_bytes, _SLACK, _SLACK_BYTES),
        growth("handles", lambda held: held.n_handles, 0.0, 0.0),
        growth("threads", lambda held: held.n_threads, 0.0, 0.0),
    )
