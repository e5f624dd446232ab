"""`specrun train drafter`: a small model that learns to draft for a target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import SpecrunError
from specrun.cli.options.group import SectionedCommand, option, option_group
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import ExistingFile
from specrun.cli.terminal.table import print_facts
from specrun.cli.terminal.terminal import Terminal
from specrun.cli.train.head import check_gguf, plot_file
from specrun.cli.train.options import (
    TrainResult,
    TrainRun,
    TrainSource,
    run_settings,
    train_result_options,
    train_run_options,
    train_source_options,
)
from specrun.cli.train.progress import shown_run

if TYPE_CHECKING:
    from specrun.train.distillation.acceptance import MeasuredAcceptance
    from specrun.train.distillation.drafter_run import DrafterReport

_DISTILLATION, _BOOSTING, _MEASURE = "Distillation", "Several drafters", "Acceptance rate"
_SHARE = click.FloatRange(0, 1)
_EPILOG = """\b
Examples:
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data chats.jsonl -o drafter --gguf drafter.gguf
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data prompts.jsonl -o drafter --on-policy 1
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data chats.jsonl -o second \\
      --not-covered-by drafter.gguf

\b
DistillSpec: the drafter learns the target's law at every token of an answer. Answers are those of the data,
those the target samples first (--answers target), or, for a share of the texts (--on-policy), those the drafter
samples as it learns; with --on-policy 1 or --answers target, prompts without answers will do. What counts is
alpha, the share of drafted tokens that the target accepts: it is measured on held-out texts before and after.
"""  # noqa: E501 - as it is shown


@dataclass(frozen=True, slots=True)
class Distillation:
    """What is learnt, and on whose answers."""

    draft: Path
    divergence: str
    answers: str
    on_policy: float
    law_temperature: float
    longest_answer: int
    not_covered_by: tuple[Path, ...]
    covered_weight: float
    measure_on: str
    measure_temp: float


_distillation_options = option_group(
    "distillation",
    Distillation,
    option(
        "--draft",
        section="Target and data",
        type=click.Path(path_type=Path),
        required=True,
        metavar="DIR",
        help="The drafter to begin with: a folder of the target's family, with its vocabulary.",
    ),
    option(
        "--divergence",
        section=_DISTILLATION,
        type=click.Choice(["forward-kl", "reverse-kl", "jensen-shannon", "total-variation"]),
        default="forward-kl",
        show_default=True,
        help=(
            "Of the drafter's law from the target's; total-variation is 1 - alpha itself, and "
            "slow to start."
        ),
    ),
    option(
        "--answers",
        section=_DISTILLATION,
        type=click.Choice(["given", "target"]),
        default="given",
        show_default=True,
        help="Learn on the data's answers, or on those that the target samples before training.",
    ),
    option(
        "--on-policy",
        section=_DISTILLATION,
        type=_SHARE,
        default=0.0,
        show_default=True,
        metavar="SHARE",
        help="The share of the answers that the drafter samples anew at every step.",
    ),
    option(
        "--law-temp",
        "law_temperature",
        section=_DISTILLATION,
        type=click.FloatRange(0, 100, min_open=True),
        default=1.0,
        show_default=True,
        metavar="T",
        help="The temperature of both laws, and of sampled answers.",
    ),
    option(
        "--longest-answer",
        section=_DISTILLATION,
        type=click.IntRange(1, 2**20),
        default=128,
        show_default=True,
        metavar="N",
        help="The most tokens of a sampled answer.",
    ),
    option(
        "--not-covered-by",
        section=_BOOSTING,
        type=ExistingFile(),
        multiple=True,
        help=(
            "A drafter (GGUF) beside which this one will draft: learn what it gets wrong "
            "(SpecInfer); repeatable."
        ),
    ),
    option(
        "--covered-weight",
        section=_BOOSTING,
        type=_SHARE,
        default=0.0,
        show_default=True,
        metavar="WEIGHT",
        help="What a token counts that one of them gets right.",
    ),
    option(
        "--measure-on",
        section=_MEASURE,
        type=click.Choice(["target", "given"]),
        default="target",
        show_default=True,
        help="Measure on answers that the target samples to held-out prompts, or on those given.",
    ),
    option(
        "--measure-temp",
        section=_MEASURE,
        type=click.FloatRange(0, 100),
        default=1.0,
        show_default=True,
        metavar="T",
        help="The temperature at which alpha is measured.",
    ),
)


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@train_source_options
@_distillation_options
@train_run_options
@train_result_options
@terminal_options
def drafter(
    source: TrainSource,
    distillation: Distillation,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Train a small model to draft for a target."""
    from specrun.convert import plan_conversion
    from specrun.train.distillation.drafter_run import DrafterRun
    from specrun.train.distillation.learner import DistillationLoss
    from specrun.train.distillation.train_drafter import train_drafter

    plot = plot_file(result)
    check_gguf(result)
    if result.gguf is not None:
        plan_conversion(
            distillation.draft.expanduser(), outtype=result.outtype
        )  # what is trained has its layout
    wanted = DrafterRun(
        **run_settings(source, run, result),
        draft=distillation.draft.expanduser(),
        loss=DistillationLoss(
            divergence=distillation.divergence,
            temperature=distillation.law_temperature,
            on_policy=distillation.on_policy,
            covered_weight=distillation.covered_weight,
        ),
        answers=distillation.answers,
        measured_on=distillation.measure_on,
        measured_at=distillation.measure_temp,
        not_covered_by=distillation.not_covered_by,
        longest_answer=distillation.longest_answer,
    )
    with shown_run(terminal) as shown:
        report = train_drafter(wanted, shown)
    if plot is not None:
        from specrun.bench.plots import plot_training

        plot_training(
            report.result.curves,
            plot,
            f"{wanted.draft.resolve().name} for {wanted.target.resolve().name}",
        )
    gguf = None if result.gguf is None else _convert(wanted.output, result.gguf, result)
    _report(report, wanted.not_covered_by, plot, gguf, result, terminal)


def _convert(folder: Path, gguf: Path, result: TrainResult) -> Path:
    from specrun.convert import convert_checkpoint

    try:
        return convert_checkpoint(folder, gguf, outtype=result.outtype, force=result.force).output
    except SpecrunError as error:
        error.add_note("the trained drafter is whole: convert it with specrun convert")
        raise


def _report(
    report: DrafterReport,
    others: tuple[Path, ...],
    plot: Path | None,
    gguf: Path | None,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    gain, curves = report.acceptance, report.result.curves
    if result.as_json:
        terminal.answer(json.dumps(_record(report, plot, gguf)) + "\n")
    else:
        shown = {
            "folder": str(report.output),
            "parameters": f"{report.n_trained:,}",
            "trained": (
                f"{len(curves.losses):,} steps, {report.result.tokens:,} tokens, "
                f"{report.result.seconds:,.0f} s"
            ),
            "on": f"{report.device}, {report.precision}",
            "loss": f"{curves.losses[0]:.3f} to {curves.losses[-1]:.3f}",
            "alpha": f"{_stated(gain.before)} before, {_stated(gain.after)} after",
            "gain of alpha": f"{gain.gain:+.4f} +- {gain.error:.4f}",
            "same first token": (
                f"{report.before.same_top:.4f} before, {report.after.same_top:.4f} after"
            ),
        }
        if others:
            known = f"{report.after.covered:.4f} without it"
            shown["first tokens known together"] = (
                f"{known}, {report.after.covered_together:.4f} with it"
            )
        if plot is not None:
            shown["curves"] = str(plot)
        if gguf is not None:
            shown["GGUF"] = str(gguf)
        print_facts(terminal, "drafter trained", shown)
    if report.measured_on_training:
        terminal.warn(
            "there were too few texts to hold any out: alpha is that of the texts it learnt"
        )
    if gain.gain < 0:
        terminal.warn("alpha fell: use more data, a lower --learning-rate, or --answers target")


def _stated(found: MeasuredAcceptance) -> str:
    return f"{found.rate:.4f} +- {found.error:.4f}"


def _record(report: DrafterReport, plot: Path | None, gguf: Path | None) -> dict[str, Any]:
    """Return what --json prints; an error over one text is null."""
    curves = report.result.curves

    def measured(found: MeasuredAcceptance) -> dict[str, Any]:
        error = found.error if found.n_texts > 1 else None
        return {
            "rate": found.rate,
            "error": error,
            "positions": found.n_positions,
            "texts": found.n_texts,
        }

    gain = report.acceptance
    return {
        "output": str(report.output),
        "kind": "drafter",
        "gguf": None if gguf is None else str(gguf),
        "plot": None if plot is None else str(plot),
        "parameters": report.n_trained,
        "sequences": report.n_sequences,
        "measured_on_training": report.measured_on_training,
        "steps": len(curves.losses),
        "tokens": report.result.tokens,
        "seconds": report.result.seconds,
        "loss": curves.losses[-1],
        "alpha_before": measured(gain.before),
        "alpha_after": measured(gain.after),
        "alpha_gain": {"gain": gain.gain, "error": gain.error if gain.before.n_texts > 1 else None},
        "same_first_word": [report.before.same_top, report.after.same_top],
        "covered_by_others": report.after.covered,
        "covered_together": report.after.covered_together,
        "precision": report.precision,
        "device": report.device,
    }
