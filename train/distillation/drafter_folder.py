"""The folder and the model card of a distilled drafter, which other tools can read, too."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.bindings.files import require_free_space, sync_folder
from specrun.runtime.planning import expected_tokens
from specrun.train.distillation.acceptance import MeasuredAcceptance
from specrun.train.distillation.drafter_run import DrafterReport, DrafterRun
from specrun.train.target.hf_model import HFModel, quiet_transformers
from specrun.train.trainer.model_folder import (
    copy_tokenizer,
    model_card,
    table_lines,
    training_lines,
    write_json,
    write_text,
)
from specrun.train.trainer.precision import dtype_name

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_LENGTH = 5


def write_drafter_folder(draft: HFModel, source: Path, output: Path, card: str) -> None:
    """Write the drafter into `output`; config and tokenizer are those of the folder `source`.

    Weights are written in the numbers they were trained in. Files are written aside and renamed,
    weights last, so that an interrupted call leaves either the old model or none that loads half.
    """
    parameters = list(draft.module.parameters())
    require_free_space(output, sum(each.numel() * each.element_size() for each in parameters))
    with _aside(output) as aside:
        with quiet_transformers():
            draft.model.save_pretrained(aside)
        copy_tokenizer(source, aside)
        # As published, where transformers writes what its own version says; only the numbers' type
        # is another now.
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("dtype", None)
        write_json(
            aside / "config.json", {**config, "torch_dtype": dtype_name(parameters[0].dtype)}
        )
        write_text(aside / "README.md", card)
        written = sorted(
            aside.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name in _WEIGHTS)
        )
        for path in written:
            # By a rename each file is the old one or the new one, whole.
            path.replace(output / path.name)
    sync_folder(output)


@contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """Yield a hidden folder within `output`, which is gone afterwards."""
    folder = output / f".{secrets.token_hex(8)}.partial"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drafter_card(run: DrafterRun, report: DrafterReport) -> str:
    """Return the card in Markdown."""
    target, draft = run.target.resolve().name, run.draft.resolve().name
    loss = {name.replace("_", " "): value for name, value in dataclasses.asdict(run.loss).items()}
    own = f"{100 * run.loss.on_policy:.0f} % written by the drafter"
    settings = {
        "answers learnt on": f"{run.answers}, {own}",
        **loss,
        "longest answer": run.longest_answer,
        "longest text": run.max_length,
        "tokens per batch": run.tokens_per_batch,
        "seed": run.seed,
        "precision": report.precision,
    }
    losses = report.result.curves.losses
    fell = f"{run.loss.divergence} {losses[0]:.4f} at first, {losses[-1]:.4f} at last."
    return model_card(
        f"{draft}, a drafter for {target}",
        tags="draft-model, distillation",
        base_model=draft,
        made="Made by `specrun train drafter` (DistillSpec, Zhou et al. 2023): "
        f"{report.n_trained:,} parameters that learnt the laws of {target}. Verification keeps the "
        "target's own tokens or distribution whatever it drafts.",
        sections={
            "Data": [
                f"{', '.join(path.name for path in run.data)}: {report.n_sequences:,} sequences. "
                "The licences of the data and of both models apply."
            ],
            "Training": training_lines(report, fell, settings),
            "Acceptance rate": _acceptance(run, report),
        },
        commands=(
            "specrun convert FOLDER -o drafter.gguf --outtype q8_0",
            "specrun chat -m TARGET.gguf -md drafter.gguf",
        ),
    )


def _acceptance(run: DrafterRun, report: DrafterReport) -> list[str]:
    gain, before, after = report.acceptance, report.before, report.after
    texts = "held-out texts"
    if report.measured_on_training:
        texts = "the training texts (too few to hold any out)"
    answers = "sampled from the target" if run.measured_on == "target" else "as given"
    rows = {
        "alpha": f"{_stated(gain.before)} | {_stated(gain.after)}",
        "same first token": f"{before.same_top:.4f} | {after.same_top:.4f}",
        "expected tokens a round": f"{_tokens(gain.before)} | {_tokens(gain.after)}",
    }
    if run.not_covered_by:
        others = ", ".join(path.name for path in run.not_covered_by)
        together = f"{before.covered_together:.4f} | {after.covered_together:.4f}"
        rows[f"known by {others}"] = f"{before.covered:.4f} | {after.covered:.4f}"
        rows["known by one of all"] = together
    return [
        "Alpha, the mean over positions of 1 - TV(target, drafter), at temperature "
        f"{run.measured_at:g} on {texts}, answers {answers}. Standard errors are over "
        f"{gain.before.n_texts:,} texts; expected tokens a round are (1 - alpha^{_LENGTH + 1}) / "
        f"(1 - alpha) (Leviathan et al. 2023, equation 1) for chains of {_LENGTH}.",
        "",
        *table_lines("| | before | after |", rows),
        "",
        f"Alpha rose by {gain.gain:.4f} +- {gain.error:.4f} (paired over texts).",
    ]


def _stated(found: MeasuredAcceptance) -> str:
    return f"{found.rate:.4f} +- {found.error:.4f}"


def _tokens(found: MeasuredAcceptance) -> str:
    return f"{expected_tokens(min(1.0, found.rate), _LENGTH):.2f}"
