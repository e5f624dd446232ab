"""A run that distils a drafter: what is given, what comes out, and what a resumed run must have in common with it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.train.distillation.acceptance import AcceptanceGain
from specrun.train.distillation.learner import Comparison, DistillationLoss
from specrun.train.source_identity import source_digest
from specrun.train.token_corpus import TokenCorpus
from specrun.train.training_progress import TrainingResult
from specrun.train.training_run import TrainingDefaults, TrainingRun

__all__ = ["ANSWER_SOURCES", "DEFAULTS", "WEIGHTS_NAME", "DrafterReport", "DrafterRun", "run_identity"]

ANSWER_SOURCES = ("given", "target")
"""Who may have written answers before training: the data, or the target, which samples them."""

WEIGHTS_NAME = "model.safetensors"
"""The file that a finished run leaves."""

DEFAULTS = TrainingDefaults(learning_rate=3e-4, clip_norm=1.0)
"""The rate is DistillSpec's, of its larger drafters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRun(TrainingRun):
    """A run that distils a drafter.

    `draft` is a Hugging Face folder as `target` is. Training learns on `answers`, of which the drafter writes a share
    of its own (`loss.on_policy`); alpha is measured on `measured_on`, at temperature `measured_at`. Sampled answers
    have at most `longest_answer` words, and at most `most_held_out` texts are only measured on.
    """

    draft: Path
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    answers: str = "given"
    measured_on: str = "target"
    measured_at: float = 1.0
    not_covered_by: tuple[Path, ...] = ()
    longest_answer: int = 128
    most_held_out: int = 200

    def __post_init__(self) -> None:
        TrainingRun.__post_init__(self)  # super() does not know a class with slots
        for name in ("answers", "measured_on"):
            if getattr(self, name) not in ANSWER_SOURCES:
                raise OptionError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(ANSWER_SOURCES)}")
        if not 0 <= self.measured_at <= 100:
            raise OptionError(f"alpha cannot be measured at temperature {self.measured_at:g}: give 0 or more")
        if self.longest_answer < 1:
            raise OptionError(f"answers of {self.longest_answer} words: give at least 1")


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


def run_identity(run: DrafterRun, corpus: TokenCorpus) -> dict[str, Any]:
    """Return what a resumed run must have in common with the one it goes on with, beside the trainer's settings."""
    # Answers that the drafter writes are cut there; of other texts the data's digest says it.
    cut = {"max length": run.max_length} if run.loss.on_policy else {}
    sources = {"target": (run.target,), "drafter": (run.draft,), "covered by": run.not_covered_by}
    return {
        "kind": "drafter",
        "data": corpus.digest[:16],
        "answers": run.answers,
        "longest answer": run.longest_answer,
        **cut,
        **{f"loss {name}": value for name, value in dataclasses.asdict(run.loss).items()},
        **{name: [source_digest(path) for path in paths] for name, paths in sources.items()},
    }
