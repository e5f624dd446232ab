"""`specrun train drafter`: a small model that learns the target's law by distillation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.options.group import Section, option_group
from specrun.cli.options.types import FILE, PATH, SHARE
from specrun.cli.train.online import learn_online
from specrun.cli.train.options import DATA, DIVERGENCE, WHOSE_ANSWERS, TrainJob, train_command
from specrun.cli.train.progress import shown_run
from specrun.cli.train.training import check_result, draw_and_convert, print_report

if TYPE_CHECKING:
    from pathlib import Path

    from specrun.train.distillation import DrafterReport, DrafterRun, MeasuredAcceptance

_ONLINE = Section("Learning from rejected drafts")
_DISTILLATION, _BOOSTING = Section("Distillation"), Section("Several drafters")
_MEASURE = Section("Acceptance rate")
_EPILOG = """\b
Examples:
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data chats.jsonl -o drafter --gguf drafter.gguf
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data prompts.jsonl -o drafter --on-policy 1
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data chats.jsonl -o second \\
      --not-covered-by drafter.gguf
  specrun train drafter --online buffer.bin --draft drafter.gguf -o learnt --gguf drafter-2.gguf

\b
DistillSpec: the drafter learns the target's law at every token of an answer. Answers are those of the data,
those the target samples first (--answers target), or, for a share of the texts (--on-policy), those the drafter
samples as it learns; with --on-policy 1 or --answers target, prompts without answers will do. What counts is
alpha, the share of drafted tokens that the target accepts: it is measured on held-out texts before and after.

\b
With --online the drafter learns where the drafts of `specrun chat --learn-keep` were rejected (`specrun learn
show` names the file); --target and --data are not needed, and --draft may be the GGUF file that drafts.
"""  # noqa: E501 - as it is shown


@dataclass(frozen=True, slots=True)
class Distillation:
    """What is learnt, and on whose answers."""

    draft: Path
    online: Path | None
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
    DATA.option(
        "--draft DIR",
        "The drafter to begin with: a folder of the target's family, with its vocabulary; with "
        "--online also a GGUF file.",
        PATH,
        required=True,
    ),
    _ONLINE.option(
        "--online BUFFER",
        "Learn from the drafts that a chat's target rejected, instead of --data.",
        FILE,
    ),
    _DISTILLATION.option(
        "--divergence",
        "Of the drafter's law from the target's; total-variation is 1 - alpha itself, and slow to "
        "start.",
        DIVERGENCE,
        default="forward-kl",
    ),
    _DISTILLATION.option(
        "--answers",
        "Learn on the data's answers, or on those that the target samples before training.",
        WHOSE_ANSWERS,
        default="given",
    ),
    _DISTILLATION.option(
        "--on-policy SHARE",
        "The share of the answers that the drafter samples anew at every step.",
        SHARE,
        default=0.0,
    ),
    _DISTILLATION.option(
        "--law-temp T",
        "The temperature of both laws, and of sampled answers.",
        click.FloatRange(0, 100, min_open=True),
        dest="law_temperature",
        default=1.0,
    ),
    _DISTILLATION.option(
        "--longest-answer N",
        "The most tokens of a sampled answer.",
        click.IntRange(1, 2**20),
        default=128,
    ),
    _BOOSTING.option(
        "--not-covered-by",
        "A drafter (GGUF) beside which this one will draft: learn what it gets wrong (SpecInfer); "
        "repeatable.",
        FILE,
        multiple=True,
    ),
    _BOOSTING.option(
        "--covered-weight WEIGHT",
        "What a token counts that one of them gets right.",
        SHARE,
        default=0.0,
    ),
    _MEASURE.option(
        "--measure-on",
        "Measure on answers that the target samples to held-out prompts, or on those given.",
        click.Choice(["target", "given"]),
        default="target",
    ),
    _MEASURE.option(
        "--measure-temp T",
        "The temperature at which alpha is measured.",
        click.FloatRange(0, 100),
        default=1.0,
    ),
)


@train_command(_EPILOG, _distillation_options, needs_target=False, needs_data=False)
def drafter(job: TrainJob, distillation: Distillation) -> None:
    """Train a small model to draft for a target."""
    if distillation.online is not None:
        learn_online(job, distillation.draft, distillation.online, distillation.divergence)
        return
    for name in ("target", "data"):
        if not job.settings[name]:
            raise click.UsageError(f"Missing option '--{name}' (or give --online BUFFER).")
    from specrun.convert import convert_checkpoint, plan_conversion
    from specrun.train.distillation import train_drafter

    plot = check_result(job.result)
    run = _run(job, distillation)
    if job.result.gguf is not None:
        plan_conversion(run.draft, outtype=job.result.outtype)  # what is trained has its layout
    with shown_run(job.terminal) as shown:
        report = train_drafter(run, shown)
    files = draw_and_convert(
        job, run, report, plot, run.draft.resolve().name, convert_checkpoint, what="drafter"
    )
    _show(job, report, files, with_others=bool(run.not_covered_by))


def _run(job: TrainJob, distillation: Distillation) -> DrafterRun:
    from specrun.train.distillation import DistillationLoss, DrafterRun

    return DrafterRun(
        **job.settings,
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


def _show(
    job: TrainJob,
    report: DrafterReport,
    files: dict[str, Path | None],
    *,
    with_others: bool,
) -> None:
    """Print what came of it, and what should worry its reader."""
    gain, before, after = report.acceptance, report.before, report.after
    gain_error = gain.error if gain.before.n_texts > 1 else None
    print_report(
        job,
        "drafter",
        report,
        files,
        shown=_facts(report, with_others=with_others),
        counts={"measured_on_training": report.measured_on_training},
        measures={
            "alpha_before": _record(gain.before),
            "alpha_after": _record(gain.after),
            "alpha_gain": {"gain": gain.gain, "error": gain_error},
            "same_first_token": [before.same_top, after.same_top],
            "covered_by_others": after.covered,
            "covered_together": after.covered_together,
        },
    )
    if report.measured_on_training:
        job.terminal.warn(
            "there were too few texts to hold any out: alpha is that of the texts it learnt"
        )
    if gain.gain < 0:
        job.terminal.warn("alpha fell: use more data, a lower --learning-rate, or --answers target")


def _facts(report: DrafterReport, *, with_others: bool) -> dict[str, str]:
    """Return what is shown of a training; `with_others`: of drafters it is to add to, as well."""
    gain, before, after = report.acceptance, report.before, report.after
    facts = {
        "alpha": f"{_stated(gain.before)} before, {_stated(gain.after)} after",
        "gain of alpha": f"{gain.gain:+.4f} +- {gain.error:.4f}",
        "same first token": f"{before.same_top:.4f} before, {after.same_top:.4f} after",
    }
    if with_others:
        together = f"{after.covered:.4f} without it, {after.covered_together:.4f} with it"
        facts["first tokens known together"] = together
    return facts


def _stated(found: MeasuredAcceptance) -> str:
    return f"{found.rate:.4f} +- {found.error:.4f}"


def _record(found: MeasuredAcceptance) -> dict[str, Any]:
    """Return what --json prints of an acceptance rate; its error over one text is null."""
    return {
        "rate": found.rate,
        "error": found.error if found.n_texts > 1 else None,
        "positions": found.n_positions,
        "texts": found.n_texts,
    }
