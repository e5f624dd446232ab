"""What is installed, in the lines of `specrun --version`."""

from __future__ import annotations

import importlib.metadata

from specrun.cli.printable import one_line

__all__ = ["specrun_version", "version_lines"]


def specrun_version() -> str:
    """Return the installed version of specrun."""
    return importlib.metadata.version("specrun")


def version_lines() -> list[str]:
    """Return the versions and backends; loads llama.cpp, because only the library knows its commit."""
    from specrun.bindings.devices import devices
    from specrun.bindings.library import engine_versions

    lines = [f"specrun {specrun_version()}"]
    lines += [f"{name} {one_line(version)}" for name, version in engine_versions().items()]
    backends = ", ".join(dict.fromkeys(one_line(device.name) for device in devices()))
    return [*lines, f"backends {backends or 'none'}"]
