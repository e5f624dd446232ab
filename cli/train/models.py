"""Models that training makes: `specrun train drafter`, also with `--online`, and `consistency`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.options.group import Section
from specrun.cli.options.types import FILE, PATH, SHARE
from specrun.cli.train.options import (
    DATA,
    DIVERGENCE,
    WHOSE_ANSWERS,
    OptionValue,
    TrainJob,
    train_command,
)
from specrun.cli.train.report import check_result, print_report, trained

if TYPE_CHECKING:
    from specrun.train.distillation import DrafterReport, MeasuredAcceptance

# == A drafter =====================================================================================


_ONLINE = Section("Learning from rejected drafts")
_DISTILLATION, _BOOSTING = Section("Distillation"), Section("Several drafters")
_MEASURE = Section("Acceptance rate")
_DRAFTER_EPILOG = """\b
Examples:
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data chats.jsonl -o drafter --gguf drafter.gguf
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data prompts.jsonl -o drafter --on-policy 1
  specrun train drafter --target Llama-3.1-8B --draft Llama-3.2-1B --data chats.jsonl -o second \\
      --not-covered-by drafter.gguf
  specrun train drafter --online buffer.bin --draft drafter.gguf -o learnt --gguf drafter-2.gguf

\b
DistillSpec: the drafter learns the target's distribution at every token of an answer. Answers come from the
data, from the target before training (--answers target) or, for a share of the texts (--on-policy), from the
drafter during training. With --on-policy 1 or --answers target, prompts without answers are enough. The goal is
alpha, the share of drafted tokens that the target accepts. It is measured on held-out texts before and after.

\b
With --online the drafter learns from the rejected drafts of `specrun chat --learn-keep` (`specrun learn show`
names the file). --target and --data are not needed, and --draft may be the drafter's GGUF file.
"""  # noqa: E501 - as it is shown


@train_command(
    _DRAFTER_EPILOG,
    DATA.option(
        "--draft DIR",
        "The drafter to start from: a folder of the target's family with the same vocabulary. "
        "With --online it may be a GGUF file.",
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
        "The divergence of the drafter's distribution from the target's. total-variation is 1 "
        "- alpha itself, and slow to start.",
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
        "The temperature of both distributions, and of sampled answers.",
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
        "Another drafter (GGUF) that will draft together with this one. Learn the tokens that "
        "it gets wrong (SpecInfer). Repeatable.",
        FILE,
        multiple=True,
    ),
    _BOOSTING.option(
        "--covered-weight WEIGHT",
        "The weight of a token that one of them gets right.",
        SHARE,
        default=0.0,
    ),
    _MEASURE.option(
        "--measure-on",
        "Measure on answers that the target samples for held-out prompts, or on the data's "
        "answers.",
        click.Choice(["target", "given"]),
        default="target",
    ),
    _MEASURE.option(
        "--measure-temp T",
        "The temperature at which alpha is measured.",
        click.FloatRange(0, 100),
        default=1.0,
    ),
    needs_target=False,
    needs_data=False,
)
def drafter(job: TrainJob, draft: Path, online: Path | None, **values: OptionValue) -> None:
    """Train a small model to draft for a target."""
    draft = draft.expanduser()
    if online is not None:
        _learn_online(job, draft, online, values["divergence"])
        return
    for name in ("target", "data"):
        if not job.settings[name]:
            raise click.UsageError(f"Missing option '--{name}' (or give --online BUFFER).")
    from specrun.convert import convert_checkpoint, plan_conversion
    from specrun.train.distillation import DistillationLoss, DrafterRecipe
    from specrun.train.trainer import TrainingRun

    plot = check_result(job.result)
    loss = DistillationLoss(
        divergence=values.pop("divergence"),
        temperature=values.pop("law_temperature"),
        on_policy=values.pop("on_policy"),
        covered_weight=values.pop("covered_weight"),
    )
    recipe = DrafterRecipe(
        draft=draft,
        loss=loss,
        measured_on=values.pop("measure_on"),
        measured_at=values.pop("measure_temp"),
        **values,
    )
    run = TrainingRun(**job.settings)
    if job.result.gguf is not None:
        plan_conversion(draft, outtype=job.result.outtype)  # the trained drafter has its layout
    title = draft.resolve().name
    report, files = trained(job, recipe, run, plot, title, convert_checkpoint, what="drafter")
    _show(job, report, files, with_others=bool(recipe.not_covered_by))


def _show(
    job: TrainJob, report: DrafterReport, files: dict[str, Path | None], *, with_others: bool
) -> None:
    """Print the result, if it drafts `with_others` theirs too, and warnings."""
    gain, before, after = report.acceptance, report.before, report.after
    gain_error = gain.error if gain.before.n_texts > 1 else None
    facts = {
        "alpha": f"{gain.before} before, {gain.after} after",
        "gain of alpha": f"{gain.gain:+.4f} +- {gain.error:.4f}",
        "same first token": f"{before.same_top:.4f} before, {after.same_top:.4f} after",
    }
    if with_others:
        together = f"{after.covered:.4f} without it, {after.covered_together:.4f} with it"
        facts["first tokens known together"] = together
    print_report(
        job,
        "drafter",
        report,
        files,
        shown=facts,
        counts={"measured_on_training": report.measured_on_training},
        measures={
            "alpha_before": {**_record(gain.before), "texts": gain.before.n_texts},
            "alpha_after": {**_record(gain.after), "texts": gain.after.n_texts},
            "alpha_gain": {"gain": gain.gain, "error": gain_error},
            "same_first_token": [before.same_top, after.same_top],
            "covered_by_others": after.covered,
            "covered_together": after.covered_together,
        },
    )
    if report.measured_on_training:
        job.terminal.warn(
            "there were too few texts to hold any out: alpha was measured on the training texts"
        )
    if gain.gain < 0:
        job.terminal.warn("alpha fell: use more data, a lower --learning-rate, or --answers target")


def _record(found: MeasuredAcceptance) -> dict[str, Any]:
    """Return an acceptance rate as --json prints it; its error over one text is null."""
    error = found.error if found.n_texts > 1 else None
    return {"rate": found.rate, "error": error, "positions": found.n_positions}


# == A drafter that learns online ==================================================================


def _learn_online(job: TrainJob, draft: Path, buffer: Path, divergence: str) -> None:
    """Let `draft`, a GGUF file or a folder, learn from `buffer`, and report the result."""
    from specrun.convert import convert_checkpoint, plan_conversion
    from specrun.runtime.online import MOST_FILE_BYTES, load_rejections
    from specrun.train.online import OnlineRecipe
    from specrun.train.trainer import TrainingRun

    for name in ("target", "data"):
        if job.settings[name]:
            raise click.UsageError(
                f"--online has the texts and the distributions: leave out --{name}"
            )
    plot = check_result(job.result)
    if job.result.gguf is not None and draft.is_dir():
        plan_conversion(draft, outtype=job.result.outtype)
    key, rejected = load_rejections(buffer, most_bytes=MOST_FILE_BYTES)
    settings = {**job.settings, "target": Path(key.name), "data": ()}
    made = None if draft.is_dir() else job.result.gguf  # a GGUF file has its form already
    recipe = OnlineRecipe(draft=draft, buffer=buffer, divergence=divergence, gguf=made)
    title, is_file = draft.resolve().name, not draft.is_dir()
    convertible = replace(job, result=replace(job.result, gguf=None)) if is_file else job
    run = TrainingRun(**settings)
    report, files = trained(
        convertible, recipe, run, plot, title, convert_checkpoint, what="drafter"
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
            "rejected drafts": f"{report.n_places:,} of {len(rejected):,} answers",
            "alpha there": f"{before.rate:.4f} before, {after.rate:.4f} after",
        },
        counts={"rejected": report.n_places, "measured_on_training": report.measured_on_training},
        measures={"alpha_before": _record(before), "alpha_after": _record(after)},
    )
    if report.measured_on_training:
        job.terminal.warn(
            "there were too few answers to hold any out: alpha was measured on the training answers"
        )
    if after.rate <= before.rate:
        job.terminal.warn("alpha did not rise: chat longer, or use another --learning-rate")


# == A target for Jacobi decoding ==================================================================


_CONSISTENCY = Section("Consistency")
_CONSISTENCY_EPILOG = """\b
Examples:
  specrun train consistency --target Llama-3.2-1B --data prompts.jsonl -o cllm --gguf cllm.gguf
  specrun chat -m cllm.gguf --drafter "jacobi(n=16)" --temp 0

\b
CLLM: the result is A NEW MODEL, not a drafter. Its text is its own, not the old target's: verification
keeps the new one's tokens. Compare its answers before you use it.

\b
The target answers the prompts of the data by Jacobi decoding, in specrun's runtime; answers of the data are
not read. Then a copy of it learns to predict the same after its own wrong guesses as after the right
tokens (--form global) or after the next guesses (--form local). It goes on learning its own answers. Narrow
targets allow higher rates: at a width of 256 use -lr 1e-3.
"""  # noqa: E501 - as it is shown


@train_command(
    _CONSISTENCY_EPILOG,
    _CONSISTENCY.option(
        "--block N",
        "The number of guesses in an iterate. Decode with jacobi(n=N).",
        click.IntRange(1, 128),
        default=16,
    ),
    _CONSISTENCY.option(
        "--form",
        "The goal of each row: the distribution after the answer itself, or after the next "
        "iterate.",
        click.Choice(["global", "local"]),
        default="global",
    ),
    _CONSISTENCY.option(
        "--weight X",
        "The weight of the divergence along trajectories, relative to the loss on answers.",
        click.FloatRange(0),
        default=1.0,
    ),
    _CONSISTENCY.option(
        "--divergence",
        "The divergence of the distribution after guesses from the one that is learnt.",
        DIVERGENCE,
        default="forward-kl",
    ),
    _CONSISTENCY.option(
        "--states N",
        "Train on N iterates of an answer in each step.",
        click.IntRange(1, 64),
        default=4,
    ),
    _CONSISTENCY.option(
        "--answer-length N", "The most tokens in an answer.", click.IntRange(2), default=256
    ),
)
def consistency(job: TrainJob, **values: OptionValue) -> None:
    """Train a new target that Jacobi decoding decodes faster."""
    from specrun.convert import convert_checkpoint, plan_conversion
    from specrun.train.consistency import ConsistencyRecipe
    from specrun.train.trainer import TrainingRun

    plot = check_result(job.result)
    target = job.settings["target"]
    plan_conversion(target, outtype="f16")  # the runtime collects trajectories
    if job.result.gguf is not None:
        plan_conversion(target, outtype=job.result.outtype)
    recipe = ConsistencyRecipe(**values)
    title = f"consistency of {target.resolve().name}"
    run = TrainingRun(**job.settings)
    report, files = trained(job, recipe, run, plot, title, convert_checkpoint, what="model")
    same = f"{report.same_answers} of {report.n_decoded} held-out answers are the same as before"
    print_report(
        job,
        "new target",
        report,
        files,
        shown={
            "tokens per iteration": f"{report.before:.3f} before, {report.after:.3f} after "
            f"(jacobi(n={recipe.block}), temperature 0)",
            "text": same,
        },
        counts={"measured_on_training": report.measured_on_training, "decoded": report.n_decoded},
        measures={
            "tokens_per_iteration_before": report.before,
            "tokens_per_iteration_after": report.after,
            "same_answers": report.same_answers,
        },
    )
    job.terminal.warn(
        f"this is a new model, not {target.resolve().name}: its text is its own. "
        f"{same[0].upper() + same[1:]}"
    )
    if report.measured_on_training:
        job.terminal.warn(
            "there were too few prompts to hold any out: figures are of the training prompts"
        )
