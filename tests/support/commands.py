"""Runs of the command line in the tests' own process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from measure.command import measure
from specrun.cli.main import cli

__all__ = ["results_of", "run", "run_measure"]


def run(line: str, *more: object) -> Result:
    """Run `specrun` with the arguments of `line`, which are split at spaces, and `more`."""
    return CliRunner().invoke(cli, [*line.split(), *map(str, more)])


def run_measure(line: str, *more: object) -> Result:
    """Run `tools/measure` with the arguments of `line`, which are split at spaces, and `more`."""
    return CliRunner().invoke(measure, [*line.split(), *map(str, more)])


def results_of(done: Result) -> list[dict[str, Any]]:
    """Return the "results" of a command that printed JSON and ended well."""
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found
