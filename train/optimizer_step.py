"""One step of a trainer: gradients of all parts of the loss, clipped, and AdamW's update at the schedule's rate."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from specrun.train.learner import Learner
from specrun.train.token_corpus import TokenBatch
from specrun.train.trainer_settings import TrainerSettings
from specrun.train.training_faults import not_a_number

__all__ = ["OptimizerStep", "PartValues"]

PartValues = dict[str, tuple[float, float]]
"""The values of a loss's parts by name, with and without their weights."""


class OptimizerStep:
    """The optimizer of a learner's parameters, and what leads to its steps.

    `kept` says, where a step fails, what is kept of those before it.
    """

    def __init__(self, learner: Learner, settings: TrainerSettings, kept: Callable[[], str]) -> None:
        self._learner, self._settings, self._kept = learner, settings, kept
        groups = learner.groups()
        self._starts = [one.starts_at for one in groups]
        self._rates = [one.rate for one in groups]
        self._parameters = [parameter for one in groups for parameter in one.parameters]
        self.optimizer = torch.optim.AdamW(
            [{"params": list(one.parameters)} for one in groups],
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )

    def gradients(self, batch: TokenBatch, step: int) -> PartValues:
        """Leave the clipped gradients at the parameters; return the parts' values.

        Raises SpecrunError where a loss or the gradient is not a number.
        """
        values = self._add_up(batch.to(self._learner.device), step)
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm))
        if not math.isfinite(norm):
            raise not_a_number("gradient", step + 1, norm, self._kept())
        return values

    def update(self, step: int) -> None:
        """Change the parameters by their gradients."""
        settings = self._settings
        factor = settings.rate_factor(step)
        for group, rate, start in zip(self.optimizer.param_groups, self._rates, self._starts, strict=True):
            group["lr"] = settings.learning_rate * rate * factor * (step >= start)
        self.optimizer.step()

    def drop_gradients(self) -> None:
        """Give the gradients' memory back."""
        self.optimizer.zero_grad(set_to_none=True)

    def _add_up(self, batch: TokenBatch, step: int) -> PartValues:
        device, precision = self._learner.device, self._settings.precision
        noise = torch.Generator(device=device)
        noise.manual_seed(self._settings.seed * 1_000_003 + step)
        self.drop_gradients()
        values: PartValues = {}
        parts = self._learner.losses(batch, noise, step)
        while True:
            with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                part = next(parts, None)
            if part is None:
                return values
            value = float(part.value.detach())
            if not math.isfinite(value):
                raise not_a_number("loss", step + 1, value, self._kept())
            part.value.backward()  # type: ignore[no-untyped-call]
            values[part.name] = (value, part.plain)
