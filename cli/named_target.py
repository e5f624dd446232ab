"""The target that options name: a file, or the embedded one."""

from __future__ import annotations

from pathlib import Path

import click

from specrun.cli.model_options import LoadSettings
from specrun.cli.paths import require_file

__all__ = ["check_named", "named_target"]


def named_target(load: LoadSettings, *, ask: str = "give -m FILE, or --demo for the embedded models") -> Path:
    """Return the file of -m, or the embedded target's where --demo is given; `ask` is said where neither is."""
    from specrun.runtime.demo import demo_target

    check_named(load, ask=ask)
    return require_file(load.model or demo_target())


def check_named(load: LoadSettings, *, ask: str = "give -m FILE, or --demo for the embedded models") -> None:
    """Raise UsageError unless exactly one of -m and --demo is given."""
    if load.demo == (load.model is not None):
        problem = "--demo and -m exclude each other" if load.demo else "no model is given"
        raise click.UsageError(f"{problem}: {ask}")
