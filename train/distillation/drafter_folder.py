"""The folder of a trained drafter: weights, config and the drafter's own tokenizer files, for other
tools too.

The model card of a distilled drafter: from what, how, and what it gained.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specrun.bindings.atomic import require_free_space, sync_folder
from specrun.runtime.costs import expected_tokens
from specrun.train.distillation.acceptance import MeasuredAcceptance
from specrun.train.distillation.drafter_run import DrafterReport, DrafterRun
from specrun.train.heads.folder import copy_tokenizer
from specrun.train.target.hf_model import HFModel
from specrun.train.trainer.precision import dtype_name

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def write_drafter_folder(draft: HFModel, source: Path, output: Path, card: str) -> None:
    """Write the drafter, whose config and tokenizer are those of the folder `source`, into the
    folder `output`.

    Weights are written in the numbers they were trained in. Files are written aside and renamed,
    weights last, so that an interrupted call leaves either the old model or none that loads half.
    """
    require_free_space(
        output,
        sum(
            parameter.numel() * parameter.element_size() for parameter in draft.module.parameters()
        ),
    )
    with _aside(output) as aside:
        with _without_bars():
            draft.model.save_pretrained(aside)
        copy_tokenizer(source, aside)
        # As published, where transformers writes its own version's words; only the numbers' type is
        # another now.
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("dtype", None)
        config["torch_dtype"] = dtype_name(next(draft.module.parameters()).dtype)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (aside / "README.md").write_text(card, encoding="utf-8")
        written = sorted(
            aside.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name in _WEIGHTS)
        )
        for path in written:
            path.replace(output / path.name)
    sync_folder(output)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars of its own."""
    import transformers

    quiet: Any = transformers.utils.logging
    drawn = quiet.is_progress_bar_enabled()
    quiet.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            quiet.enable_progress_bar()


@contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """Yield a hidden folder within `output`, which is gone afterwards."""
    folder = output / f".{secrets.token_hex(8)}.partial"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
        f"Made by `specrun train drafter` (DistillSpec, Zhou et al. 2023): {report.n_trained:,} "
        "parameters that learnt "
        f"the laws of {target}. Verification keeps the target's own tokens or distribution "
        "whatever it drafts.",
        "",
        "## Data",
        f"{', '.join(path.name for path in run.data)}: {report.n_sequences:,} sequences. The "
        "licences of the data and "
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
        "answers learnt on": (
            f"{run.answers}, {100 * run.loss.on_policy:.0f} % written by the drafter"
        ),
        **{name.replace("_", " "): value for name, value in dataclasses.asdict(run.loss).items()},
        "longest answer": run.longest_answer,
        "longest text": run.max_length,
        "tokens per batch": run.tokens_per_batch,
        "seed": run.seed,
        "precision": report.precision,
    }
    return [
        "## Training",
        f"{len(losses):,} steps, {report.result.tokens:,} tokens, {report.result.seconds:,.0f} s "
        f"on {report.device}; "
        f"{run.loss.divergence} {losses[0]:.4f} at first, {losses[-1]:.4f} at last.",
        "",
        "| setting | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in settings.items()),
        "",
    ]


def _acceptance(run: DrafterRun, report: DrafterReport) -> list[str]:
    gain = report.acceptance
    where = (
        "the training texts (too few to hold any out)"
        if report.measured_on_training
        else "held-out texts"
    )
    lines = [
        "## Acceptance rate",
        "Alpha, the mean over positions of 1 - TV(target, drafter), at temperature "
        f"{run.measured_at:g} on {where}, "
        f"answers {'sampled from the target' if run.measured_on == 'target' else 'as given'}. "
        "Standard errors "
        f"are over {gain.before.n_texts:,} texts; expected tokens a round are (1 - "
        f"alpha^{_LENGTH + 1}) / (1 - alpha) "
        f"(Leviathan et al. 2023, equation 1) for chains of {_LENGTH}.",
        "",
        "| | before | after |",
        "|---|---|---|",
        f"| alpha | {_stated(gain.before)} | {_stated(gain.after)} |",
        f"| same first token | {report.before.same_top:.4f} | {report.after.same_top:.4f} |",
        f"| expected tokens a round | {_tokens(gain.before)} | {_tokens(gain.after)} |",
    ]
    if run.not_covered_by:
        others = ", ".join(path.name for path in run.not_covered_by)
        lines += [
            f"| known by {others} | {report.before.covered:.4f} | {report.after.covered:.4f} |",
            (
                f"| known by one of all | {report.before.covered_together:.4f} | "
                f"{report.after.covered_together:.4f} |"
            ),
        ]
    return [
        *lines,
        "",
        f"Alpha rose by {gain.gain:.4f} +- {gain.error:.4f} (paired over texts).",
        "",
    ]


def _stated(found: MeasuredAcceptance) -> str:
    return f"{found.rate:.4f} +- {found.error:.4f}"


def _tokens(found: MeasuredAcceptance) -> str:
    return f"{expected_tokens(min(1.0, found.rate), _LENGTH):.2f}"
