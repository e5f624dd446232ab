"""Steps that all trainers share: checks before the run, curves, GGUF, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import SpecrunError
from specrun.cli.options.output import check_plot
from specrun.cli.terminal.screen import print_facts
from specrun.cli.train.options import TrainJob, TrainResult

if TYPE_CHECKING:
    from specrun.convert.conversion import ConversionReport
    from specrun.train.trainer import TrainingReport, TrainingRun


def check_result(result: TrainResult) -> Path | None:
    """Return where the curves are drawn, None without matplotlib if nobody asked for them.

    Raises before the training what drawing and converting would raise after it of places and types.
    """
    from specrun.bindings.files import check_target
    from specrun.convert.conversion import known_type
    from specrun.convert.quantize import HEAD_TYPE  # noqa: F401 - the extra that converting needs

    check_plot(result.plot)
    known_type(result.outtype)
    if result.gguf is not None:
        check_target(result.gguf, force=result.force)
    if result.plot is not None:
        return result.plot
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    return result.output.expanduser() / "training" / "curves.png"


def draw_and_convert(
    job: TrainJob,
    run: TrainingRun,
    report: TrainingReport,
    plot: Path | None,
    title: str,
    convert: Callable[..., ConversionReport],
    *,
    what: str,
) -> dict[str, Path | None]:
    """Draw the curves and convert the folder, as asked; return the files that were written."""
    if plot is not None:
        from specrun.bench.plots import plot_training

        plot_training(report.result.curves, plot, f"{title} for {run.target.resolve().name}")
    result, gguf = job.result, None
    if result.gguf is not None:
        settings = {"outtype": result.outtype, "force": result.force}
        try:
            gguf = convert(run.output, result.gguf, **settings).output
        except SpecrunError as error:
            error.add_note(f"the trained {what} is whole: convert it with specrun convert")
            raise
    return {"gguf": gguf, "plot": plot}


def print_report(
    job: TrainJob,
    kind: str,
    report: TrainingReport,
    files: Mapping[str, Path | None],
    *,
    shown: Mapping[str, str],
    counts: Mapping[str, Any],
    measures: Mapping[str, Any],
) -> None:
    """Print what was made: `shown` of it as facts, or with --json its `counts` and `measures`."""
    losses, result = report.result.curves.losses, report.result
    if job.result.as_json:
        facts = {
            "output": str(report.output),
            "kind": kind,
            **{name: path and str(path) for name, path in files.items()},
            "parameters": report.n_trained,
            "sequences": report.n_sequences,
            **counts,
            "steps": len(losses),
            "tokens": result.tokens,
            "seconds": result.seconds,
            "loss": losses[-1] if losses else None,
            **measures,
            "precision": report.precision,
            "device": report.device,
        }
        job.terminal.answer(json.dumps(facts) + "\n")
        return
    lines = {
        "folder": str(report.output),
        "parameters": f"{report.n_trained:,}",
        "trained": f"{len(losses):,} steps, {result.tokens:,} tokens, {result.seconds:,.0f} s",
        "on": f"{report.device}, {report.precision}",
        "loss": f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "-",
        **shown,
    }
    for name, file in (("curves", "plot"), ("GGUF", "gguf")):
        if files[file] is not None:
            lines[name] = str(files[file])
    print_facts(job.terminal, f"{kind} trained", lines)
