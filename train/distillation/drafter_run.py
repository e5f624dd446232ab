"""A run that distils a drafter: what is given, what comes out, and what a resumed run must have in common with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specrun.bindings.errors import OptionError
from specrun.train.distillation.acceptance import AcceptanceGain
from specrun.train.distillation.learner import Comparison, DistillationLoss
from specrun.train.source_identity import source_identity
from specrun.train.token_corpus import TokenCorpus
from specrun.train.trainer import TrainerSettings, TrainingResult

__all__ = ["ANSWER_SOURCES", "WEIGHTS_NAME", "DrafterReport", "DrafterRun", "drafter_settings", "run_identity"]

ANSWER_SOURCES = ("given", "target")
"""Who may have written answers before training: the data, or the target, which samples them."""

WEIGHTS_NAME = "model.safetensors"
"""The file that a finished run leaves."""

_LEARNING_RATE = 3e-4  # DistillSpec's, of its larger drafters


@dataclass(frozen=True, slots=True)
class DrafterRun:
    """A drafter to distil, for how long, and where to write it.

    `target` and `draft` are Hugging Face folders, `data` files of text or JSON Lines. Training learns on `answers`, of
    which the drafter writes a share of its own (`loss.on_policy`); alpha is measured on `measured_on`, at temperature
    `measured_at`. Texts have at most `max_length` words, sampled answers `longest_answer`. A share `held_out` of the
    texts, at most `most_held_out`, is only measured on. `steps` overrules `epochs`; `warmup` is a share of the steps,
    `measures` how often held-out texts are measured.
    """

    target: Path
    draft: Path
    data: tuple[Path, ...]
    output: Path
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    answers: str = "given"
    measured_on: str = "target"
    measured_at: float = 1.0
    not_covered_by: tuple[Path, ...] = ()
    longest_answer: int = 128
    epochs: int = 1
    steps: int | None = None
    tokens_per_batch: int = 4096
    max_length: int = 2048
    held_out: float = 0.05
    most_held_out: int = 200
    learning_rate: float | None = None
    warmup: float = 0.03
    measures: int = 10
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    save_seconds: float = 180.0
    n_threads: int = 0
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("answers", "measured_on"):
            if getattr(self, name) not in ANSWER_SOURCES:
                raise OptionError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(ANSWER_SOURCES)}")
        if not 0 <= self.measured_at <= 100:
            raise OptionError(f"alpha cannot be measured at temperature {self.measured_at:g}: give 0 or more")
        if self.longest_answer < 1:
            raise OptionError(f"answers of {self.longest_answer} words: give at least 1")
        if self.epochs < 1:
            raise OptionError(f"{self.epochs} epochs: give at least 1")
        if not 0 <= self.held_out < 1:
            raise OptionError(f"a held-out share of {self.held_out:g}: give 0 to below 1")
        if not 0 <= self.warmup < 1:
            raise OptionError(f"a warm-up of {self.warmup:g} of the steps: give 0 to below 1")

    @property
    def state_path(self) -> Path:
        """The checkpoint."""
        return self.output / "training" / "state.pt"


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """What was made. `acceptance` is alpha before and after on the same texts, `before` and `after` say more of them.

    With `measured_on_training` there were too few texts to hold any out.
    """

    output: Path
    acceptance: AcceptanceGain
    before: Comparison
    after: Comparison
    result: TrainingResult
    n_trained: int
    n_sequences: int
    measured_on_training: bool
    precision: str
    device: str


def drafter_settings(run: DrafterRun, corpus: TokenCorpus, precision: torch.dtype) -> TrainerSettings:
    """Return how a run is made."""
    per_epoch = len(corpus.training_batches(0, run.seed, run.tokens_per_batch))
    steps = run.steps if run.steps is not None else run.epochs * per_epoch
    return TrainerSettings(
        steps=steps,
        learning_rate=_LEARNING_RATE if run.learning_rate is None else run.learning_rate,
        tokens_per_batch=run.tokens_per_batch,
        warmup_steps=round(run.warmup * steps),
        measure_every=max(1, math.ceil(steps / run.measures)) if run.measures else 0,
        seed=run.seed,
        save_seconds=run.save_seconds,
        precision=precision,
    )


def run_identity(run: DrafterRun, corpus: TokenCorpus) -> dict[str, Any]:
    """Return what a resumed run must have in common with the one it goes on with, beside the trainer's settings."""
    sources = {"target": (run.target,), "drafter": (run.draft,), "covered by": run.not_covered_by}
    return {
        "kind": "drafter",
        "data": corpus.digest[:16],
        "answers": run.answers,
        "longest answer": run.longest_answer,
        **{f"loss {name}": value for name, value in dataclasses.asdict(run.loss).items()},
        **{name: [_digest(path) for path in paths] for name, paths in sources.items()},
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(json.dumps(source_identity(path)).encode()).hexdigest()[:16]
