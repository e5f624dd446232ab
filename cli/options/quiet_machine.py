"""`--anyway`, and the look at the machine's load before and after whatever measures time."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from specrun.bindings.errors import SpecrunError
from specrun.bindings.machine.other_load import OtherLoad
from specrun.cli.options.group import OUTPUT
from specrun.cli.options.model import LoadSettings
from specrun.cli.terminal.terminal import Terminal

Command = Callable[..., Any]


def measures_time(command: Command) -> Command:
    """Give a command --anyway: without it a busy machine is an error, and later load a warning."""

    @functools.wraps(command)
    def watched(*, anyway: bool, load: LoadSettings, terminal: Terminal, **others: Any) -> Any:  # noqa: ANN401
        if not (load.demo or load.model or others.get("file")):
            anyway = True  # the command itself refuses to run without a model
        machine = OtherLoad(load.options.context.n_threads or os.cpu_count() or 1)
        busy = "" if anyway else machine.now()
        if busy:
            advice = "wait until they are done, or add --anyway"
            raise SpecrunError(f"{busy}, so figures would be worthless: {advice}")
        machine.since_last()
        result = command(load=load, terminal=terminal, **others)
        disturbed = machine.disturbance()
        if disturbed:
            terminal.warn(f"{disturbed} meanwhile: the figures may be wrong")
        return result

    flag = OUTPUT.flag("--anyway", "Measure even if other programs are busy.", dest="anyway")
    return flag(watched)
