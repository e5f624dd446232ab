"""`specrun doctor`: what is installed, what the machine offers, and what is broken."""

from __future__ import annotations

import json

import click

from specrun.cli.diagnosis import Diagnosis, diagnose
from specrun.cli.option_group import SectionedCommand, option
from specrun.cli.output_options import terminal_options
from specrun.cli.quantities import bytes_text
from specrun.cli.table import print_facts, print_table
from specrun.cli.terminal import Terminal

__all__ = ["doctor"]

_EPILOG = """\b
Examples:
  specrun doctor
  specrun doctor --json > report.json      to attach to a bug report

Exit code 1 if something is broken.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@terminal_options
@option("--json", "as_json", section="Output", is_flag=True, help="Print one JSON object.")
def doctor(terminal: Terminal, as_json: bool) -> None:
    """Check this installation and this machine.

    Quantized kernels are tried in processes of their own, so that a processor that lacks an instruction
    is reported instead of ending the program.
    """
    terminal.passing("looking around, a few seconds ...")
    try:
        diagnosis = diagnose()
    finally:
        terminal.passing("")
    if as_json:
        terminal.answer(json.dumps(diagnosis.to_dict()) + "\n")
    else:
        _print(terminal, diagnosis)
    if not diagnosis.healthy:
        click.get_current_context().exit(1)


def _print(terminal: Terminal, diagnosis: Diagnosis) -> None:
    print_facts(terminal, "versions", diagnosis.versions)
    print_facts(terminal, "machine", diagnosis.machine)
    devices = [
        (one["name"], one["description"], one["kind"], bytes_text(one["memory_free"]), bytes_text(one["memory_total"]))
        for one in diagnosis.devices
    ]
    if devices:
        print_table(terminal, "devices", ("name", "description", "kind", "free", "memory"), devices)
    rows = [(check.name, check.state, check.detail) for check in diagnosis.checks]
    print_table(terminal, "checks", ("check", "state", ""), rows)
    for check in diagnosis.checks:
        if check.remedy:
            terminal.warn(f"{check.name}: {check.remedy}")
    terminal.answer("Nothing is broken.\n" if diagnosis.healthy else "Something is broken: see above.\n")
