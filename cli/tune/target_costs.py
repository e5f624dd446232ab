"""`specrun tune -m TARGET`: a target's cost curve, with which drafters without a model plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.cli.options.model import LoadSettings
from specrun.cli.terminal.screen import print_table, progress_bar
from specrun.cli.terminal.terminal import Terminal, require_file
from specrun.cli.tune.options import TuneOutput, TuneText

if TYPE_CHECKING:
    from pathlib import Path

    from specrun.runtime.planning import CostCurve
    from specrun.runtime.tuning import WeightType


# == Mixtures of experts: how many of them verification reads, and its time here ===================


SIZES = (2, 4, 8)
"""Tokens of evaluations that verify 1, 3 and 7 drafts."""


def experts_text(n_experts: int, n_used: int) -> str:
    """Print how many experts evaluations of several tokens read."""
    from specrun.runtime.planning import expected_experts

    read = ", ".join(f"{expected_experts(n_experts, n_used, n):.1f}" for n in SIZES)
    sizes = ", ".join(map(str, SIZES[:-1])) + f" and {SIZES[-1]}"
    return (
        f"{n_used} of {n_experts} for a token; {sizes} tokens read about {read} of a layer's "
        "(fewer if they choose alike), so verifying drafts costs more than with a dense model"
    )


def warn_of_experts(target: Path, curve: CostCurve, terminal: Terminal) -> None:
    """Warn of the reads and the time of a target's evaluations if it is a mixture of experts."""
    from specrun.bindings.gguf import read_header
    from specrun.runtime.planning import mixture

    n_experts, n_used = mixture(read_header(target))
    if not n_experts:
        return
    times = ", ".join(f"T({n}) = {curve.seconds(n) / curve.seconds(1):.2f} T(1)" for n in SIZES)
    terminal.note(
        f"{target.name} is a mixture of experts, {experts_text(n_experts, n_used)}; measured here: "
        f"{times}"
    )


# == The cost curve ================================================================================


def run_target_costs(
    load: LoadSettings, target: Path, text: TuneText, output: TuneOutput, terminal: Terminal
) -> None:
    """Measure the target's cost curve, print it and keep it."""
    from specrun.runtime.memory import layers_here
    from specrun.runtime.planning import measure_target_costs, save_curve
    from specrun.runtime.tuning import weight_types

    if output.plot is not None:
        raise click.UsageError("--plot draws the plans for a draft model: give -md FILE too")
    target, context = require_file(target), load.context
    with progress_bar(terminal, "loading the model") as progress:
        curve = measure_target_costs(
            target,
            load.options,
            seconds=text.seconds,
            progress=lambda share: progress("measuring the target", share),
        )
    layers = layers_here(target, load.options)
    types = weight_types(target, curve, context, layers)
    if terminal.as_json:
        costs = curve.to_dict()
        found = {"target": str(target), "target_costs": costs, "weight_types": _as_json(types)}
        terminal.answer_json(found, indent=2)
    else:
        _show(curve, terminal)
        if len(types) > 1:
            _show_types(types, terminal)
        warn_of_experts(target, curve, terminal)
    if output.save:
        path = save_curve(curve, target, context, layers)
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
            f"{100 * curve.spread_at(size):.0f} %",
            _padded(curve, size),
        )
        for size, seconds in ((size, curve.seconds(size)) for size in curve.sizes)
    ]
    head = ("tokens", "ms", "times one", "most gain", "spread", "padded to")
    print_table(terminal, "What an evaluation costs", head, rows)


def _padded(curve: CostCurve, size: int) -> str:
    wider = curve.wider(size, curve.sizes[-1])
    return str(wider) if wider > size else ""


def _show_types(types: Sequence[WeightType], terminal: Terminal) -> None:
    """Print how files of other weight types compare, and the notes on them."""
    from specrun.runtime.tuning import ACCEPTED

    rows = []
    for known in types:
        cells = [""] * 5
        if known.curve is not None:
            single = known.curve.seconds(1)
            cells = [f"{known.plain:.1f}"]
            cells += [f"{known.curve.seconds(size) / single:.2f}" for size in (2, 4, 8)]
            cells += [f"{known.gain:.2f}"]
        rows.append((known.file.name, *cells))
    head = ("file", "tokens/s", "T(2)", "T(4)", "T(8)", "drafts gain")
    title = f"Weight types; gains if {10 * ACCEPTED:.0f} of 10 drafts are accepted"
    print_table(terminal, title, head, rows)
    measured = [known for known in types if known.curve is not None]
    if len(measured) > 1:
        fastest = max(measured, key=lambda known: known.plain * known.gain)
        speed = fastest.plain * fastest.gain
        terminal.answer_line(
            f"drafting gains most with {measured[0].file.name} ({measured[0].gain:.2f} times); "
            f"with it {fastest.file.name} is fastest ({speed:.1f} tokens/s)"
        )
    for known in types:
        if known.curve is None:
            terminal.note(f"not measured: specrun tune -m {known.file}")


def _as_json(types: Sequence[WeightType]) -> list[dict[str, object]]:
    return [
        {
            "file": str(known.file),
            "tokens_per_second": known.plain or None,
            "gain": known.gain or None,
        }
        for known in types
    ]
