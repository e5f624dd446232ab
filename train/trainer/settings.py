"""The trainer's settings: steps, learning rate and its schedule, optimizer, precision."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from specrun.bindings.errors import OptionError
from specrun.train.trainer.precision import dtype_name

MatrixOptimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True)
class TrainingDefaults:
    """How a kind of model is trained where the user says nothing else."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 0.5
    weight_decay: float = 0.0
    matrix_optimizer: MatrixOptimizer = "adamw"


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How long and how fast to learn; a resumed run must have the same `identity`.

    `learning_rate` is the peak, after `warmup_steps` of a straight rise; it then falls as a cosine
    to `final_rate` of the peak. With `decay` it stays at the peak instead until the last share
    `decay` of the steps, in which it falls in a straight line to `final_rate`. `matrix_optimizer`
    trains the hidden matrices that a learner names, AdamW all else. `clip_norm` bounds the length
    of the gradient, `measure_every` counts steps between measures (0: only at the end).
    """

    steps: int
    learning_rate: float
    tokens_per_batch: int = 4096
    warmup_steps: int = 0
    final_rate: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    measure_every: int = 0
    seed: int = 0
    save_seconds: float = 180.0
    precision: torch.dtype = torch.float32
    decay: float | None = None
    matrix_optimizer: MatrixOptimizer = "adamw"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise OptionError(f"{self.steps} steps: give at least 1")
        if not 0 < self.learning_rate < 10:
            rate = f"a learning rate of {self.learning_rate:g}"
            raise OptionError(f"{rate}: give a number above 0, such as 1e-3")
        if self.tokens_per_batch < 1:
            raise OptionError(f"{self.tokens_per_batch} tokens in a batch: give at least 1")
        known = get_args(MatrixOptimizer)
        if self.matrix_optimizer not in known:
            given = f"the matrices' optimizer is {self.matrix_optimizer!r}"
            raise OptionError(f"{given}: use one of {', '.join(known)}")
        if self.decay is not None and not 0 < self.decay <= 1:
            share = f"a decay over {self.decay:g} of the steps"
            raise OptionError(f"{share}: give a share above 0, at most 1")

    def rate_factor(self, step: int) -> float:
        """Return what the peak learning rate is multiplied by at a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay is not None:
            left = min(1.0, (self.steps - step) / (self.decay * self.steps))
            return self.final_rate + (1 - self.final_rate) * left
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        return self.final_rate + (1 - self.final_rate) * cosine

    @property
    def precision_name(self) -> str:
        """The precision as users write it."""
        return dtype_name(self.precision)

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint's run and a resumed one must have in common.

        Not how often it is saved, nor its precision, nor the end of a plateau, which may be put off
        while it lasts. What most runs leave alone is left out there, as in the checkpoints of
        versions that did not know it.
        """
        values = dataclasses.asdict(self)
        left_out = ["save_seconds", "precision", "decay" if self.decay is None else "steps"]
        if self.matrix_optimizer == "adamw":
            left_out.append("matrix_optimizer")
        for name in left_out:
            del values[name]
        return {**values, "betas": list(self.betas)}  # as checkpoints give them back
