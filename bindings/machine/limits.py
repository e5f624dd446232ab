"""Limits of a process: memory, time, files; set by the process itself, before it begins."""

from __future__ import annotations

from collections.abc import Mapping


def limit_process(limits: Mapping[str, int]) -> None:
    """Lower limits of this process, by their names in the module `resource`.

    A limit that the system does not have is left out; so are all on Windows.
    """
    try:
        import resource
    except ImportError:
        return
    for name, limit in limits.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(kind, (limit, hard))
