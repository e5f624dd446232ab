"""What the commands that train heads have in common: run, plot, convert, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.bindings.errors import SpecrunError
from specrun.cli.terminal.table import print_facts
from specrun.cli.terminal.terminal import Terminal
from specrun.cli.train.options import (
    TrainFeatures,
    TrainResult,
    TrainRun,
    TrainSource,
    run_settings,
)
from specrun.cli.train.progress import ShownRun, measures_text, shown_run

if TYPE_CHECKING:
    from specrun.train.data.own_answers import AnswerSettings
    from specrun.train.heads.recipe import HeadRecipe
    from specrun.train.heads.run import HeadRun
    from specrun.train.trainer.run import TrainingReport


def run_head_training(
    recipe: HeadRecipe,
    source: TrainSource,
    states: TrainFeatures,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Train a head, draw its curves, convert it where asked for, and say what it can do."""
    from specrun.train.heads.training import train_head

    def train(wanted: HeadRun, shown: ShownRun) -> TrainingReport:
        return train_head(recipe, wanted, shown)

    target = states.teacher or source.target.expanduser()
    train_and_report(recipe.kind, train, target, source, states, run, result, terminal)


def train_and_report(
    kind: str,
    train: Callable[[HeadRun, ShownRun], TrainingReport],
    drafts_for: Path,
    source: TrainSource,
    states: TrainFeatures,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Run `train`, draw its curves, convert the head for the target `drafts_for`, and say what it
    can do."""
    from specrun.train.heads.run import HeadRun

    plot = plot_file(result)
    check_gguf(result)
    wanted = HeadRun(
        **run_settings(source, run, result),
        teacher=states.teacher,
        own_answers=_own_answers(states, run.seed),
        cache=states.cache,
        features=states.features,
    )
    if result.gguf is not None:
        _check_drafted_for(states.teacher or wanted.target)
    with shown_run(terminal) as shown:
        report = train(wanted, shown)
    if plot is not None:
        from specrun.bench.plots import plot_training

        plot_training(report.result.curves, plot, f"{kind} for {wanted.target.resolve().name}")
    gguf = None if result.gguf is None else _convert(wanted.output, kind, result, drafts_for)
    _report(kind, report, plot, gguf, result, terminal)


def _own_answers(states: TrainFeatures, seed: int) -> AnswerSettings | None:
    if states.answers == "given":
        return None
    from specrun.train.data.own_answers import AnswerSettings

    return AnswerSettings(temperature=states.answer_temp, longest=states.answer_length, seed=seed)


def plot_file(result: TrainResult) -> Path | None:
    """Return where the curves are drawn; None where nothing was asked for and matplotlib is not
    there."""
    from specrun.bench.plots import check_plot_file

    if result.plot is not None:
        check_plot_file(result.plot)
        return result.plot
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        return None
    return result.output.expanduser() / "training" / "curves.png"


def check_gguf(result: TrainResult) -> None:
    """Raise before the training what converting would raise after it of the file's place and
    type."""
    from specrun.bindings.atomic import check_target
    from specrun.convert.conversion import known_type
    from specrun.convert.quantize import HEAD_TYPE as _  # noqa: F401 - the extra that converting needs

    known_type(result.outtype)
    if result.gguf is not None:
        check_target(result.gguf, force=result.force)


def _check_drafted_for(target: Path) -> None:
    """Raise before the training what converting a head would raise after it of the model it drafts
    for."""
    from specrun.convert.heads.target_facts import target_facts

    target_facts(target)


def _convert(folder: Path, kind: str, result: TrainResult, target: Path) -> Path:
    from specrun.convert.heads.head_conversion import convert_head

    try:
        report = convert_head(
            folder,
            result.gguf,
            target=target,
            kind=kind,
            outtype=result.outtype,
            force=result.force,
        )
    except SpecrunError as error:
        error.add_note("the trained head is whole: convert it with specrun convert")
        raise
    return report.output


def _report(
    kind: str,
    report: TrainingReport,
    plot: Path | None,
    gguf: Path | None,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    curves = report.result.curves
    measures = curves.measures[-1][1] if curves.measures else {}
    if result.as_json:
        facts = {
            "output": str(report.output),
            "kind": kind,
            "gguf": None if gguf is None else str(gguf),
            "plot": None if plot is None else str(plot),
            "parameters": report.n_trained,
            "sequences": report.n_sequences,
            "held_out": report.n_held_out,
            "steps": len(curves.losses),
            "tokens": report.result.tokens,
            "seconds": report.result.seconds,
            "loss": curves.losses[-1] if curves.losses else None,
            "measures": measures,
            "precision": report.precision,
            "device": report.device,
        }
        terminal.answer(json.dumps(facts) + "\n")
        return
    shown = {
        "folder": str(report.output),
        "parameters": f"{report.n_trained:,}",
        "trained": (
            f"{len(curves.losses):,} steps, {report.result.tokens:,} tokens, "
            f"{report.result.seconds:,.0f} s"
        ),
        "on": f"{report.device}, {report.precision}",
        "loss": f"{curves.losses[0]:.3f} to {curves.losses[-1]:.3f}" if curves.losses else "-",
        "agrees with the target": measures_text(measures),
    }
    if plot is not None:
        shown["curves"] = str(plot)
    if gguf is not None:
        shown["GGUF"] = str(gguf)
    print_facts(terminal, f"{kind} trained", shown)
