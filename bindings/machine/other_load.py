"""The load of other programs: whatever is measured beside them is worth little."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STATISTICS = Path("/proc/stat")
_SPARE = 0.25
"""Processors that the system itself and short jobs may use."""
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: of the clock, of work by all processors, and of this program's own work."""

    clock: float
    worked: float
    own: float


def read_times() -> Times | None:
    """Return the times so far; None if the system does not provide them (Linux does)."""
    try:
        first = _STATISTICS.read_text().split("\n", 1)[0].split()
        ticks = [int(text) for text in first[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _waiting, irq, soft_irq, stolen = ticks
    worked = (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")
    return Times(time.monotonic(), worked, sum(os.times()[:4]))


class OtherLoad:
    """Counts how many processors other programs use; `n_threads` is how many are needed here."""

    def __init__(self, n_threads: int) -> None:
        self._processors = os.cpu_count() or 1
        self._free = max(0.0, self._processors - min(n_threads, self._processors)) + _SPARE
        self._last = read_times()

    def since_last(self) -> float:
        """Return how many processors others used on average since the last call; 0 if unknown."""
        before, self._last = self._last, read_times()
        if before is None or self._last is None:
            return 0.0
        seconds = self._last.clock - before.clock
        others = (self._last.worked - before.worked) - (self._last.own - before.own)
        return max(0.0, others / seconds) if seconds > 0.0 else 0.0

    def disturbance(self) -> str:
        """Return the disturbances since the last call, in words; "" if there were none."""
        others = self.since_last()
        if others <= self._free:
            return ""
        return f"other programs used {others:.1f} of {self._processors} processors"

    def now(self) -> str:
        """Look at the machine for a moment; return disturbances of a measurement, or ""."""
        self.since_last()
        time.sleep(_LOOK_SECONDS)
        return self.disturbance()
