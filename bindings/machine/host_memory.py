"""Memory of this machine: what programs may still take, within the limits of control groups."""

from __future__ import annotations

import os
from pathlib import Path

_UNKNOWN = 1 << 62


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be had without swapping; `root` is where /proc and /sys are.

    Linux's MemAvailable, or what the control groups leave if that is less: what they hold of files
    can be dropped. Elsewhere the physical memory; where nothing is known, more than any machine
    has.
    """
    found = [_meminfo(root) or _physical()]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        groups = Path(path.lstrip("/"))
        for group in (groups, *groups.parents):
            folder = root / "sys/fs/cgroup" / ("memory" if controllers else "") / group
            found.append(_left(folder, version=1 if controllers else 2))
    return max(0, min(found))


def _left(folder: Path, version: int) -> int:
    """Return what a group's limit leaves, `_UNKNOWN` without one."""
    names = ("memory.max", "memory.current") if version == 2 else _FIRST_NAMES
    limit, used = (_read(folder / name) for name in names)
    if not limit.isdigit() or not used.isdigit():
        return _UNKNOWN
    kinds = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
    counts = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line)
    of_files = sum(int(counts.get(kind, 0)) for kind in kinds[2 if version == 1 else 0 :][:2])
    return int(limit) - max(0, int(used) - of_files)


_FIRST_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _meminfo(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return 0


def _physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return _UNKNOWN


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
