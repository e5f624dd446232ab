"""Threads of evaluation: their number, their ways to wait, and their loss in a fork.

ggml's threads meet after every operation of a graph, hundreds of times a token. If another
process has taken one's processor, the others wait for it: spinning, they burn whole time slices
and the token takes a second; asleep at once, they pay a system call at every meeting.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import ForkedError
from specrun.bindings.machine.other_load import read_times

SPINS, SPINS_BUSY = 300_000, 1000
"""How often libgomp's threads look before they sleep: 3 ms or, beside other programs, 10 us."""

_CHOSEN_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors of this process: `logical` ones on `cores` of their own, `quota` at a time.

    Of processors with fast and slow cores, `cores` are the fast ones: the slowest thread sets the
    pace.
    """

    logical: int
    cores: int
    quota: float = math.inf

    @property
    def n_threads(self) -> int:
        """How many threads to evaluate with.

        Two threads of a core share its arithmetic units, and a thread beyond the quota is halted
        while the others wait for it.
        """
        return max(1, int(min(self.cores, self.quota)))

    def __str__(self) -> str:
        quota = "" if math.isinf(self.quota) else f", a quota of {self.quota:g}"
        return f"{self.logical} on {self.cores} cores{quota}"


def available_cores() -> int:
    """Return how many threads this process should evaluate with."""
    return find_processors().n_threads


def find_processors() -> Processors:
    """Return the system's figures."""
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        return Processors(len(usable), count_cores(usable), cpu_quota())
    logical = os.cpu_count() or 1
    # Without a topology, llama.cpp's guess: larger processors have two threads a core.
    return Processors(logical, _fast_cores() or (logical if logical <= 4 else logical // 2))


def count_cores(usable: set[int], root: Path = Path("/")) -> int:
    """Return on how many cores these logical processors lie: Linux's topology.

    `root` is the folder of /proc and /sys.
    """
    # Intel's processors with two kinds of cores name the fast ones.
    fast = usable & _numbers(read_text(root / "sys/devices/cpu_core/cpus"))
    topology = root / "sys/devices/system/cpu"
    siblings = (
        read_text(topology / f"cpu{number}/topology/thread_siblings_list") or str(number)
        for number in fast or usable
    )
    return len(set(siblings))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many processors' time the control groups allow, infinity without a limit.

    Version 2 writes "quota period" or "max period" into cpu.max, version 1 two files, quota -1 for
    no limit. A group is held to the limits of those above it, too.
    """
    quotas = [math.inf]
    for controllers, groups in control_groups("cpu", root):
        for mount in (controllers, "cpu" if controllers else "unified"):
            for group in groups:
                folder = root / "sys/fs/cgroup" / mount / group
                period = read_text(folder / "cpu.cfs_period_us")
                limit = f"{read_text(folder / 'cpu.cfs_quota_us')} {period}"
                quotas.append(_ratio(limit if controllers else read_text(folder / "cpu.max")))
    return min(quotas)


def control_groups(controller: str, root: Path) -> Iterator[tuple[str, tuple[Path, ...]]]:
    """Yield this process's groups of a controller, each with those above it.

    With the controllers of a hierarchy of version 1, or "" for that of version 2.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            yield controllers, (group, *group.parents)


def _ratio(limit: str) -> float:
    try:
        quota, period = map(int, limit.split())
    except ValueError:  # "max", or no such file
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def read_text(path: Path) -> str:
    """Return the text of a file of the system, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _fast_cores() -> int:
    """Return macOS's count of performance cores, or of all cores; 0 on other systems."""
    if sys.platform != "darwin":
        return 0
    count, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        ask = ctypes.CDLL(None).sysctlbyname
        if ask(name, ctypes.byref(count), ctypes.byref(size), None, ctypes.c_size_t(0)) == 0:
            return count.value
    return 0


# -- how they wait ---------------------------------------------------------------------------------


@contextmanager
def patient_threads() -> Iterator[None]:
    """Let a libgomp that is loaded meanwhile spin for SPINS looks, or SPINS_BUSY (`Patience`).

    It reads its environment once, while it is loaded. The user's choice stays, and so does
    the environment of other libraries and child processes.
    """
    if not are_spins_ours():
        yield
        return
    # That policy sets the count for more threads than processors to 1000.
    chosen = {"GOMP_SPINCOUNT": str(SPINS), "OMP_WAIT_POLICY": "active"}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            del os.environ[name]


def are_spins_ours() -> bool:
    """Whether the user has left it to this program how threads wait, and it can see the load."""
    return not any(name in os.environ for name in _CHOSEN_BY_USERS) and read_times() is not None


def describe_waiting(*, has_libgomp: bool) -> str:
    """Return a short text: how threads wait for one another, and the variable that changes it."""
    if not has_libgomp:
        return "spinning (this llama.cpp is built without libgomp, which can be told to yield)"
    for name in _CHOSEN_BY_USERS:
        if name in os.environ:
            return f"spinning by {name}={os.environ[name]}"
    if not are_spins_ours():
        return "spinning as libgomp does (GOMP_SPINCOUNT changes it)"
    return f"spinning, briefly beside other programs (GOMP_SPINCOUNT={SPINS} or {SPINS_BUSY})"


# -- fork ------------------------------------------------------------------------------------------


class Fork:
    """The losses of a fork: `lost` if threads or a GPU were at work for the process before.

    Who evaluates in every round looks at that before it calls `check`.
    """

    lost = False
    _at_work = False

    def note_work(self) -> None:
        """Remember that threads or a GPU are at work for this process: a fork copies neither."""
        self._at_work = True

    def check(self) -> None:
        """Raise `ForkedError` if evaluating would wait for threads that are not there."""
        if self.lost:
            problem = "this process was forked from one in which llama.cpp was already at work"
            advice = "fork before the first evaluation, or start processes by spawn"
            raise ForkedError(f"{problem}, and its threads stayed there: {advice}")

    def _after(self) -> None:
        self.lost = self.lost or self._at_work


FORK = Fork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FORK._after)
