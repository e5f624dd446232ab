"""The model card of a distilled drafter: from what, how, and what it gained."""

from __future__ import annotations

import dataclasses

from specrun.runtime.planning.theory import expected_tokens
from specrun.train.distillation.acceptance import MeasuredAcceptance
from specrun.train.distillation.drafter_run import DrafterReport, DrafterRun

__all__ = ["drafter_card"]

_LENGTH = 5


def drafter_card(run: DrafterRun, report: DrafterReport) -> str:
    """Return the card in Markdown."""
    target, draft = run.target.resolve().name, run.draft.resolve().name
    lines = [
        "---",
        "tags: [speculative-decoding, draft-model, distillation]",
        f"base_model: {draft}",
        "---",
        f"# {draft}, a drafter for {target}",
        "",
        f"Made by `specrun train drafter` (DistillSpec, Zhou et al. 2023): {report.n_trained:,} parameters that learnt "
        f"the laws of {target}. Verification keeps the target's own words or distribution whatever it drafts.",
        "",
        "## Data",
        f"{', '.join(path.name for path in run.data)}: {report.n_sequences:,} sequences. The licences of the data and "
        "of both models apply.",
        "",
        *_training(run, report),
        *_acceptance(run, report),
        "## Use",
        "```",
        "specrun convert FOLDER -o drafter.gguf --outtype q8_0",
        "specrun chat -m TARGET.gguf -md drafter.gguf",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _training(run: DrafterRun, report: DrafterReport) -> list[str]:
    losses = report.result.curves.losses
    settings = {
        "answers learnt on": f"{run.answers}, {100 * run.loss.on_policy:.0f} % written by the drafter",
        **{name.replace("_", " "): value for name, value in dataclasses.asdict(run.loss).items()},
        "longest answer": run.longest_answer,
        "longest text": run.max_length,
        "tokens per batch": run.tokens_per_batch,
        "seed": run.seed,
        "precision": report.precision,
    }
    return [
        "## Training",
        f"{len(losses):,} steps, {report.result.tokens:,} tokens, {report.result.seconds:,.0f} s on {report.device}; "
        f"{run.loss.divergence} {losses[0]:.4f} at first, {losses[-1]:.4f} at last.",
        "",
        "| setting | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in settings.items()),
        "",
    ]


def _acceptance(run: DrafterRun, report: DrafterReport) -> list[str]:
    gain = report.acceptance
    where = "the training texts (too few to hold any out)" if report.measured_on_training else "held-out texts"
    lines = [
        "## Acceptance rate",
        f"Alpha, the mean over positions of 1 - TV(target, drafter), at temperature {run.measured_at:g} on {where}, "
        f"answers {'sampled from the target' if run.measured_on == 'target' else 'as given'}. Standard errors "
        f"are over {gain.before.n_texts:,} texts; expected tokens a round are (1 - alpha^{_LENGTH + 1}) / (1 - alpha) "
        f"(Leviathan et al. 2023, equation 1) for chains of {_LENGTH}.",
        "",
        "| | before | after |",
        "|---|---|---|",
        f"| alpha | {_stated(gain.before)} | {_stated(gain.after)} |",
        f"| same first word | {report.before.same_top:.4f} | {report.after.same_top:.4f} |",
        f"| expected tokens a round | {_tokens(gain.before)} | {_tokens(gain.after)} |",
    ]
    if run.not_covered_by:
        others = ", ".join(path.name for path in run.not_covered_by)
        lines += [
            f"| known by {others} | {report.before.covered:.4f} | {report.after.covered:.4f} |",
            f"| known by one of all | {report.before.covered_together:.4f} | {report.after.covered_together:.4f} |",
        ]
    return [*lines, "", f"Alpha rose by {gain.gain:.4f} +- {gain.error:.4f} (paired over texts).", ""]


def _stated(found: MeasuredAcceptance) -> str:
    return f"{found.rate:.4f} +- {found.error:.4f}"


def _tokens(found: MeasuredAcceptance) -> str:
    return f"{expected_tokens(min(1.0, found.rate), _LENGTH):.2f}"
