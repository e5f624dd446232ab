"""Runs of the command line: in the tests' own process, and in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from click.testing import CliRunner, Result

from measure.command import measure
from specrun.cli.main import cli
from support.ctrl_c import hearing_ctrl_c

__all__ = ["PROGRAM", "results_of", "run", "run_measure", "started"]

PROGRAM = [sys.executable, "-c", "from specrun.cli.main import main; main()"]
"""The installed program, as another process runs it."""


def run(
    line: str = "", *more: object, input: str | bytes | None = None, name: str = "cli"
) -> Result:
    """Run `specrun` with the arguments of `line`, which are split at spaces, and `more`."""
    arguments = [*line.split(), *map(str, more)]
    return CliRunner().invoke(cli, arguments, input=input, prog_name=name)


@contextmanager
def started(line: str, *more: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run `specrun` in a process that hears Ctrl-C, with one thread, until the block ends."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SPECRUN_")}
    with hearing_ctrl_c():
        process = subprocess.Popen(
            [*PROGRAM, *line.split(), *map(str, more)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**own, "SPECRUN_THREADS": "1"},
        )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run_measure(line: str, *more: object) -> Result:
    """Run `tools/measure` with the arguments of `line`, which are split at spaces, and `more`."""
    return CliRunner().invoke(measure, [*line.split(), *map(str, more)])


def results_of(done: Result) -> list[dict[str, Any]]:
    """Return the "results" of a command that printed JSON and ended well."""
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found
