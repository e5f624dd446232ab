"""The programs in tools/: they run from any folder, and every measurement has its help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.commands import run_measure

from measure.command import measure

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("measure", "--help"), "serve-soak"),
        (("family", "heads", "-h"), "python tools/family heads"),
    ],
)
def test_programs_run_from_any_folder(
    arguments: tuple[str, ...], shown: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(TOOLS / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


@pytest.mark.parametrize("name", measure.list_commands(click.Context(measure)))
def test_every_measurement_has_its_help(name: str) -> None:
    done = run_measure(f"{name} --help")
    assert done.exit_code == 0
    assert f"measure {name}" in done.output
