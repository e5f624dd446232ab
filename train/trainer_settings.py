"""How long and how fast a trainer learns."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from specrun.bindings.errors import OptionError

__all__ = ["TrainerSettings"]


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How long and how fast to learn; in a resumed run all but `save_seconds` and `precision` must stay the same.

    `learning_rate` is the peak, after `warmup_steps` of a straight rise; it then falls as a cosine to `final_rate` of
    the peak. `clip_norm` bounds the length of the gradient, `measure_every` counts steps between measures (0: only
    at the end).
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

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise OptionError(f"{self.steps} steps: give at least 1")
        if not 0 < self.learning_rate < 10:
            raise OptionError(f"a learning rate of {self.learning_rate:g}: give a number above 0, such as 1e-3")
        if self.tokens_per_batch < 1:
            raise OptionError(f"{self.tokens_per_batch} tokens in a batch: give at least 1")

    def rate_factor(self, step: int) -> float:
        """Return what the peak learning rate is multiplied by at a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint's run and a resumed one must have in common."""
        left_out = ("save_seconds", "precision")
        return {
            one.name: list(value) if isinstance(value := getattr(self, one.name), tuple) else value
            for one in dataclasses.fields(self)
            if one.name not in left_out
        }
