"""One step of training: the loss's gradients, clipped, and an update at the schedule's rate.

Muon here takes all matrices of one shape at once and in any precision: torch.optim.Muon always goes
through bfloat16, which some virtual machines claim and cannot execute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specrun.train.data.corpus import TokenBatch
from specrun.train.trainer.learner import Learner, ParameterGroup
from specrun.train.trainer.memory import not_a_number
from specrun.train.trainer.settings import TrainerSettings

# Of the quintic a x + b x^3 + c x^5, tuned by Muon's author: steep at 0, near 1 about 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_WIDE = 1.5
"""The ratio of sides from which the iteration goes on Gram matrices: fewer products, by count. Half
precision would not do there, as errors grow with the factor of small singular values, squared."""


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of [N, rows, columns] matrices towards 1, by Newton-Schulz."""
    a, b, c = _COEFFICIENTS
    # The Gram matrix of the shorter side is the smaller one.
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The Frobenius norm bounds the largest singular value: all start at 1 or below, where the
    # iteration converges.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.shape[-1] >= _WIDE * x.shape[-2] and x.dtype in (torch.float32, torch.float64):
        x = _factor(x @ x.mT, steps) @ x
    else:
        for _ in range(steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


def _factor(gram: Tensor, steps: int) -> Tensor:
    """Return the product of all steps of the iteration for Gram matrices [N, n, n].

    Each step multiplies by a polynomial y of the Gram matrix, which then is y gram y: all of them
    commute, so that steps cost products of the shorter side alone.
    """
    a, b, c = _COEFFICIENTS
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = identity.expand_as(gram)
    for step in range(steps):
        y = a * identity + b * gram + c * gram @ gram
        factor = y @ factor if step else y
        if step < steps - 1:
            gram = y @ gram @ y
    return factor


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, scaled so that AdamW's learning rates fit."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        steps: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": steps})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        momentum, lr = group["momentum"], group["lr"]
        updates = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - momentum)
            # Nesterov's momentum: the average as it will be, with this gradient counted once more.
            updates.append(parameter.grad.lerp(state["momentum"], momentum))
        stacked = orthogonalize(torch.stack(updates).to(self.dtype), group["steps"])
        # An orthogonal update has entries of 1 / sqrt(longer side): scaled to 0.2, about AdamW's.
        scale = 0.2 * max(parameters[0].shape) ** 0.5
        for parameter, update in zip(parameters, stacked, strict=True):
            parameter.add_(update.to(parameter.dtype), alpha=-lr * scale)


PartValues = dict[str, tuple[float, float]]
"""The values of a loss's parts by name, with and without their weights."""


class OptimizerStep:
    """A learner's optimizers, AdamW and perhaps Muon, with gradients and clipping.

    `kept` returns a text about the steps that are kept if one fails.
    """

    def __init__(
        self, learner: Learner, settings: TrainerSettings, kept: Callable[[], str]
    ) -> None:
        self._learner, self._settings, self._kept = learner, settings, kept
        groups = learner.groups()
        self._parameters = [parameter for group in groups for parameter in group.parameters]
        muon_trains = settings.matrix_optimizer == "muon"
        by_muon = [group for group in groups if muon_trains and group.hidden_matrices]
        by_adamw = [group for group in groups if not (muon_trains and group.hidden_matrices)]
        # By their names in checkpoints; each with the groups it trains, in order.
        self._optimizers: dict[str, tuple[torch.optim.Optimizer, list[ParameterGroup]]] = {}
        rate = settings.learning_rate
        if by_adamw:
            adamw = torch.optim.AdamW(
                _own_groups(by_adamw), rate, settings.betas, weight_decay=settings.weight_decay
            )
            self._optimizers["optimizer"] = (adamw, by_adamw)
        if by_muon:
            muon = Muon(_own_groups(by_muon), rate, dtype=settings.precision)
            self._optimizers["muon"] = (muon, by_muon)

    def gradients(self, batch: TokenBatch, step: int) -> PartValues:
        """Leave the clipped gradients at the parameters; return the parts' values.

        Raises SpecrunError if a loss or the gradient is not a number.
        """
        device, precision = self._learner.device, self._settings.precision
        noise = torch.Generator(device=device)
        # By the step: a resumed run draws the numbers of an uninterrupted one.
        noise.manual_seed(self._settings.seed * 1_000_003 + step)
        self.drop_gradients()
        values: PartValues = {}
        parts = self._learner.losses(batch.to(device), noise, step)
        while True:
            # The generator computes the loss within `next`; gradients are taken outside of
            # autocast, as torch requires it.
            with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                part = next(parts, None)
            if part is None:
                break
            value = float(part.value.detach())
            if not math.isfinite(value):
                raise not_a_number("loss", step + 1, value, self._kept())
            # Before the next part is computed, so that one part's activations are in memory at a
            # time.
            part.value.backward()  # type: ignore[no-untyped-call]
            values[part.name] = (value, part.plain)
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
        """Return the state of every optimizer for a checkpoint, by its name there."""
        return {name: optimizer.state_dict() for name, (optimizer, _) in self._optimizers.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with the contents of `state`."""
        for name, (optimizer, _) in self._optimizers.items():
            optimizer.load_state_dict(state[name])


def _own_groups(groups: list[ParameterGroup]) -> list[dict[str, Any]]:
    return [{"params": list(group.parameters)} for group in groups]
