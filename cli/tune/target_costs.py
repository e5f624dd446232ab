"""`specrun tune -m TARGET`: a target's cost curve, with which drafters without a model plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from specrun.cli.options.model import LoadSettings
from specrun.cli.terminal.paths import require_file
from specrun.cli.terminal.progress import progress_bar
from specrun.cli.terminal.table import print_table
from specrun.cli.terminal.terminal import Terminal
from specrun.cli.tune.options import TuneOutput, TuneText

if TYPE_CHECKING:
    from pathlib import Path

    from specrun.runtime.costs import CostCurve


def run_target_costs(
    load: LoadSettings, target: Path, text: TuneText, output: TuneOutput, terminal: Terminal
) -> None:
    """Measure the target's cost curve, print it and keep it."""
    from specrun.runtime.costs import measure_target_costs, save_curve
    from specrun.runtime.offload import resolve_gpu_layers

    if output.plot is not None:
        raise click.UsageError("--plot draws the plans for a draft model: give -md FILE too")
    target, context = require_file(target), load.context
    with progress_bar(terminal, "loading the model") as progress:
        curve = measure_target_costs(
            target,
            context,
            n_gpu_layers=load.gpu_layers,
            seconds=text.seconds,
            use_mmap=load.mmap,
            progress=lambda share: progress("measuring the target", share),
        )
    if output.as_json:
        costs = {"sizes": curve.sizes, "reused": curve.reused, "rebuilt": curve.rebuilt}
        terminal.answer(json.dumps({"target": str(target), "target_costs": costs}, indent=2) + "\n")
    else:
        _show(curve, terminal)
    if output.save:
        path = save_curve(curve, target, context, resolve_gpu_layers(load.gpu_layers, target))
        terminal.note(
            f"kept in {path}: prompt-lookup, lookahead and rest plan with it; -md FILE plans for "
            "a draft model"
        )


def _show(curve: CostCurve, terminal: Terminal) -> None:
    single = curve.seconds(1)
    rows = [
        (
            str(size),
            f"{1e3 * seconds:.2f}",
            f"{seconds / single:.2f}",
            f"{size * single / seconds:.2f}",
        )
        for size, seconds in ((size, curve.seconds(size)) for size in curve.sizes)
    ]
    head = ("tokens", "ms", "times one", "most gain")
    print_table(terminal, "What an evaluation costs", head, rows)
