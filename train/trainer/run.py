"""What every training run is given: texts, length, device, a folder; and the trainer's settings
that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from specrun.bindings.errors import OptionError
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class TrainingDefaults:
    """How something is trained where nothing else is said."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 0.5
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What to train on, for how long, and where to write it.

    `target` is a Hugging Face folder, `data` files of text or JSON Lines. `steps` overrules
    `epochs`; `learning_rate` None is the usual one. `warmup` is a share of the steps, `measures`
    how often held-out data are measured. Texts have at most `max_length` tokens.
    """

    target: Path
    data: tuple[Path, ...]
    output: Path
    epochs: int = 1
    steps: int | None = None
    tokens_per_batch: int = 4096
    max_length: int = 2048
    held_out: float = 0.05
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

    def trainer_settings(
        self, usual: TrainingDefaults, corpus: TokenCorpus, precision: torch.dtype
    ) -> TrainerSettings:
        """Return how this run is made of what is usually trained so."""
        per_epoch = len(corpus.training_batches(0, self.seed, self.tokens_per_batch))
        steps = self.steps if self.steps is not None else self.epochs * per_epoch
        return TrainerSettings(
            steps=steps,
            learning_rate=usual.learning_rate if self.learning_rate is None else self.learning_rate,
            tokens_per_batch=self.tokens_per_batch,
            warmup_steps=round(self.warmup * steps),
            betas=usual.betas,
            weight_decay=usual.weight_decay,
            clip_norm=usual.clip_norm,
            measure_every=max(1, math.ceil(steps / self.measures)) if self.measures else 0,
            seed=self.seed,
            save_seconds=self.save_seconds,
            precision=precision,
        )
