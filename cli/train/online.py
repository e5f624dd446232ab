"""`specrun train drafter --online`: a drafter that learns where its drafts were rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.train.options import TrainJob
from specrun.cli.train.progress import shown_run
from specrun.cli.train.training import check_result, draw_and_convert, print_report

if TYPE_CHECKING:
    from specrun.train.distillation import MeasuredAcceptance


def learn_online(job: TrainJob, draft: Path, buffer: Path, divergence: str) -> None:
    """Let `draft`, a GGUF file or a folder, learn what `buffer` holds, and say what came of it."""
    from specrun.convert import convert_checkpoint, plan_conversion
    from specrun.runtime.online import read_facts
    from specrun.train.online import OnlineRun, train_online

    for name in ("target", "data"):
        if job.settings[name]:
            raise click.UsageError(f"--online has the texts and the laws: leave out --{name}")
    plot = check_result(job.result)
    draft = draft.expanduser()
    if job.result.gguf is not None and draft.is_dir():
        plan_conversion(draft, outtype=job.result.outtype)
    facts = read_facts(buffer)
    settings = {**job.settings, "target": Path(facts.key.name), "data": ()}
    made = None if draft.is_dir() else job.result.gguf  # a GGUF file has its form already
    run = OnlineRun(**settings, draft=draft, buffer=buffer, divergence=divergence, gguf=made)
    with shown_run(job.terminal) as shown:
        report = train_online(run, shown)
    title = draft.resolve().name
    convertible = replace(job, result=replace(job.result, gguf=None)) if report.gguf else job
    files = draw_and_convert(
        convertible, run, report, plot, title, convert_checkpoint, what="drafter"
    )
    if report.gguf is not None:
        files = {**files, "gguf": made or report.gguf}
    before, after = report.before, report.after
    print_report(
        job,
        "drafter",
        report,
        files,
        shown={
            "rejected drafts": f"{report.n_places:,} of {facts.n_answers:,} answers",
            "alpha there": f"{before.rate:.4f} before, {after.rate:.4f} after",
        },
        counts={"rejected": report.n_places, "measured_on_training": report.measured_on_training},
        measures={"alpha_before": _record(before), "alpha_after": _record(after)},
    )
    if report.measured_on_training:
        job.terminal.warn("there were too few answers to hold any out: alpha is of those it learnt")
    if after.rate <= before.rate:
        job.terminal.warn("alpha did not rise: chat longer, or use another --learning-rate")


def _record(found: MeasuredAcceptance) -> dict[str, Any]:
    error = found.error if found.n_texts > 1 else None
    return {"rate": found.rate, "error": error, "positions": found.n_positions}
