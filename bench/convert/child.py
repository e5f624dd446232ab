"""Runs a function in a process of its own, so that its time and the most memory it took are its
own.

The memory is the largest resident set (VmHWM on Linux: getrusage would also count the parent, whose
pages a child shares before it becomes another program), with everything Python and its libraries
take.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.errors import SpecrunError


@dataclass(frozen=True, slots=True)
class ChildRun:
    """What the process found: seconds of the work alone, and the most memory in bytes."""

    seconds: float
    peak_bytes: int


def run_child(module: str, *arguments: str) -> ChildRun:
    """Run `python -m module arguments`, which calls `report_run`; raises SpecrunError with its last
    words."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise SpecrunError(
            f"the measurement {module} failed: {words[-1] if words else f'code {done.returncode}'}"
        )
    content = json.loads(done.stdout.splitlines()[-1])
    return ChildRun(content["seconds"], content["peak_bytes"])


def report_run(work: Callable[[], Any], write: Callable[[str], Any]) -> None:
    """In the child: do the work and write what `run_child` reads."""
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    write(json.dumps({"seconds": seconds, "peak_bytes": peak_memory()}) + "\n")


def peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
