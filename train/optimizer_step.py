"""One step of training: the loss's gradients, clipped, and an update at the schedule's rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from specrun.train.learner import Learner, ParameterGroup
from specrun.train.muon import Muon
from specrun.train.token_corpus import TokenBatch
from specrun.train.trainer_settings import TrainerSettings
from specrun.train.training_faults import not_a_number

__all__ = ["OptimizerStep", "PartValues"]

PartValues = dict[str, tuple[float, float]]
"""The values of a loss's parts by name, with and without their weights."""


class OptimizerStep:
    """A learner's optimizers, AdamW and perhaps Muon, and what leads to their steps.

    `kept` says, where a step fails, what is kept of those before it.
    """

    def __init__(self, learner: Learner, settings: TrainerSettings, kept: Callable[[], str]) -> None:
        self._learner, self._settings, self._kept = learner, settings, kept
        groups = learner.groups()
        self._parameters = [parameter for group in groups for parameter in group.parameters]
        muon_trains = settings.matrix_optimizer == "muon"
        by_muon = [group for group in groups if muon_trains and group.hidden_matrices]
        by_adamw = [group for group in groups if not (muon_trains and group.hidden_matrices)]
        # By what checkpoints call their states; each with the groups it trains, in order.
        self._optimizers: dict[str, tuple[torch.optim.Optimizer, list[ParameterGroup]]] = {}
        if by_adamw:
            adamw = torch.optim.AdamW(
                _own_groups(by_adamw),
                lr=settings.learning_rate,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
            )
            self._optimizers["optimizer"] = (adamw, by_adamw)
        if by_muon:
            muon = Muon(_own_groups(by_muon), lr=settings.learning_rate, dtype=settings.precision)
            self._optimizers["muon"] = (muon, by_muon)

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
        for optimizer, groups in self._optimizers.values():
            for own, group in zip(optimizer.param_groups, groups, strict=True):
                own["lr"] = settings.learning_rate * group.rate * factor * (step >= group.starts_at)
            optimizer.step()

    def drop_gradients(self) -> None:
        """Give the gradients' memory back."""
        for parameter in self._parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of every optimizer, by the optimizer's name there."""
        return {name: optimizer.state_dict() for name, (optimizer, _) in self._optimizers.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint that holds what `state` returned."""
        for name, (optimizer, _) in self._optimizers.items():
            optimizer.load_state_dict(state[name])

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


def _own_groups(groups: list[ParameterGroup]) -> list[dict[str, Any]]:
    return [{"params": list(group.parameters)} for group in groups]
