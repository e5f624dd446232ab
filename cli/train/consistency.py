"""`specrun train consistency`: a new target, trained for Jacobi decoding (CLLM)."""

from __future__ import annotations

import click

from specrun.cli.options.group import Section
from specrun.cli.train.options import DIVERGENCE, TrainJob, train_command
from specrun.cli.train.progress import shown_run
from specrun.cli.train.training import check_result, draw_and_convert, print_report

_CONSISTENCY = Section("Consistency")
_EPILOG = """\b
Examples:
  specrun train consistency --target Llama-3.2-1B --data prompts.jsonl -o cllm --gguf cllm.gguf
  specrun chat -m cllm.gguf --drafter "jacobi(n=16)" --temp 0

\b
CLLM: the result is A NEW MODEL, not a drafter. It says what it says itself, not what the old target
said: verification keeps the new one's tokens. Compare its answers before you use it.

\b
The target answers the prompts of the data by Jacobi decoding, in specrun's runtime; answers of the data are
not read. Then a copy of it learns to say behind its own wrong guesses what it says behind the right tokens
(--form global), or behind the next guesses (--form local), while it goes on learning its own answers. Narrow
targets bear higher rates: at a width of 256 use -lr 1e-3.
"""  # noqa: E501 - as it is shown


@train_command(
    _EPILOG,
    _CONSISTENCY.option(
        "--block N",
        "Guesses of an iterate; decode with jacobi(n=N).",
        click.IntRange(1, 128),
        default=16,
    ),
    _CONSISTENCY.option(
        "--form",
        "What a row learns: what is said behind the answer itself, or behind the next iterate.",
        click.Choice(["global", "local"]),
        default="global",
    ),
    _CONSISTENCY.option(
        "--weight X",
        "Of the divergence along trajectories, beside the answers' own loss.",
        click.FloatRange(0),
        default=1.0,
    ),
    _CONSISTENCY.option(
        "--divergence",
        "Of the law behind guesses from the law that is learnt.",
        DIVERGENCE,
        default="forward-kl",
    ),
    _CONSISTENCY.option(
        "--states N", "Iterates of an answer that a step learns.", click.IntRange(1, 64), default=4
    ),
    _CONSISTENCY.option(
        "--answer-length N", "The most tokens of an answer.", click.IntRange(2), default=256
    ),
)
def consistency(
    job: TrainJob,
    block: int,
    form: str,
    weight: float,
    divergence: str,
    states: int,
    answer_length: int,
) -> None:
    """Train a new target that Jacobi decoding decodes faster."""
    from specrun.convert import convert_checkpoint, plan_conversion
    from specrun.train.consistency import ConsistencyRecipe, ConsistencyRun, train_consistency

    plot = check_result(job.result)
    target = job.settings["target"]
    plan_conversion(target, outtype="f16")  # the runtime collects trajectories
    if job.result.gguf is not None:
        plan_conversion(target, outtype=job.result.outtype)
    recipe = ConsistencyRecipe(block, form, weight, divergence, states)  # type: ignore[arg-type]
    run = ConsistencyRun(**job.settings, recipe=recipe, answer_length=answer_length)
    with shown_run(job.terminal) as shown:
        report = train_consistency(run, shown)
    title = f"consistency of {target.resolve().name}"
    files = draw_and_convert(job, run, report, plot, title, convert_checkpoint, what="model")
    same = f"{report.same_answers} of {report.n_decoded} held-out answers are the same as before"
    print_report(
        job,
        "new target",
        report,
        files,
        shown={
            "tokens per iteration": f"{report.before:.3f} before, {report.after:.3f} after "
            f"(jacobi(n={block}), temperature 0)",
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
        f"this is a new model, not {target.resolve().name}: it says what it says itself. "
        f"{same[0].upper() + same[1:]}"
    )
    if report.measured_on_training:
        job.terminal.warn("there were too few prompts to hold any out: figures are of those learnt")
