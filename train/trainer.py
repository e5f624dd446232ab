"""The trainer of heads and drafters: steps, checkpoints, measures, and exact resumption.

A run is a function of its settings and data: the batches of an epoch come from (seed, epoch), noise from (seed, step),
so that a run continued from a checkpoint repeats the losses of one that was never stopped.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specrun.bindings.errors import SpecrunError
from specrun.train.learner import Learner
from specrun.train.run_checkpoint import Place, check_checkpoint, load_run, save_run
from specrun.train.token_corpus import TokenBatch, TokenCorpus
from specrun.train.trainer_settings import TrainerSettings
from specrun.train.training_progress import Curves, TrainingResult, TrainingStatus

__all__ = ["train_learner"]

logger = logging.getLogger(__name__)
_SMOOTHING = 0.95  # of the loss that is shown


Report = Callable[[TrainingStatus], None]


def train_learner(
    learner: Learner,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    state_path: Path | None = None,
    *,
    resume: bool = False,
    identity: dict[str, Any] | None = None,
    report: Report | None = None,
) -> TrainingResult:
    """Train `learner` in place for `settings.steps` steps.

    With a `state_path` the state is saved there every `save_seconds`, on Ctrl-C and at the end; `resume` continues
    from it. `identity` names what else must be the same then (data, target, kind of head), in plain values. Raises
    SpecrunError where the loss or a gradient is not a number: the last checkpoint is kept.
    """
    run = _Run(learner, corpus, settings, state_path, {**settings.identity, **(identity or {})}, report)
    if state_path is not None:
        run.open(resume=resume)
    return run.train()


class _Run:
    def __init__(
        self,
        learner: Learner,
        corpus: TokenCorpus,
        settings: TrainerSettings,
        state_path: Path | None,
        identity: dict[str, Any],
        report: Report | None,
    ) -> None:
        self._learner, self._corpus, self._settings = learner, corpus, settings
        self._state_path, self._identity, self._report = state_path, identity, report
        groups = learner.groups()
        self._starts = [one.starts_at for one in groups]
        self._rates = [one.rate for one in groups]
        self._parameters = [parameter for one in groups for parameter in one.parameters]
        self._optimizer = torch.optim.AdamW(
            [{"params": list(one.parameters)} for one in groups],
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self._place = Place()
        self._curves = Curves()
        self._saved_step: int | None = None
        self._smooth: float | None = None
        self._whole = True  # whether parameters, optimizer and place belong to the same step

    def open(self, *, resume: bool) -> None:
        """Continue from the checkpoint, or make sure that none is overwritten."""
        assert self._state_path is not None
        check_checkpoint(self._state_path, resume=resume)
        if not resume:
            return
        self._place, self._curves = load_run(self._state_path, self._identity, self._learner, self._optimizer)
        self._saved_step = self._place.step
        for loss in self._curves.losses:
            self._smooth = _smoothed(self._smooth, loss)
        logger.info("continuing from step %d", self._place.step)

    def train(self) -> TrainingResult:
        settings = self._settings
        resumed_at = self._place.step
        saved_at = time.monotonic()
        self._learner.module.train()
        try:
            for numbers in self._batches():
                self._step(self._corpus.batch(numbers))
                step = self._place.step
                if settings.measure_every and step % settings.measure_every == 0 and step < settings.steps:
                    self._measure()
                self._tell()
                if time.monotonic() - saved_at > settings.save_seconds:
                    self._save()
                    saved_at = time.monotonic()
        except KeyboardInterrupt:
            self._save()
            raise
        if not self._curves.measures or self._curves.measures[-1][0] != self._place.step:
            self._measure()
            self._tell()
            self._saved_step = None
        self._save()
        return TrainingResult(self._curves, self._place.tokens, self._place.seconds, resumed_at)

    def _batches(self) -> Iterator[tuple[int, ...]]:
        """Yield the batches that are left; the place moves on after each."""
        settings = self._settings
        while self._place.step < settings.steps:
            batches = self._corpus.training_batches(self._place.epoch, settings.seed, settings.tokens_per_batch)
            while self._place.index < len(batches) and self._place.step < settings.steps:
                yield batches[self._place.index]
            if self._place.index >= len(batches):
                self._place = dataclasses.replace(self._place, epoch=self._place.epoch + 1, index=0)

    def _step(self, batch: TokenBatch) -> None:
        """Make one step: gradients of all parts of the loss, an update, and the place after it."""
        started = time.monotonic()
        settings, place = self._settings, self._place
        values = self._gradients(batch.to(self._learner.device), place.step)
        norm = float(nn.utils.clip_grad_norm_(self._parameters, settings.clip_norm))
        if not math.isfinite(norm):
            self._fail("gradient", norm)
        factor = settings.rate_factor(place.step)
        for group, rate, start in zip(self._optimizer.param_groups, self._rates, self._starts, strict=True):
            group["lr"] = settings.learning_rate * rate * factor * (place.step >= start)
        self._whole = False
        self._optimizer.step()
        total = sum(value for value, _ in values.values())
        self._curves.losses.append(total)
        for name, (_, plain) in values.items():
            self._curves.parts.setdefault(name, []).append(plain)
        self._smooth = _smoothed(self._smooth, total)
        self._place = Place(
            step=place.step + 1,
            epoch=place.epoch,
            index=place.index + 1,
            tokens=place.tokens + batch.n_tokens,
            seconds=place.seconds + time.monotonic() - started,
        )
        self._whole = True

    def _gradients(self, batch: TokenBatch, step: int) -> dict[str, tuple[float, float]]:
        """Add up the gradients of all parts; return the parts' values, with and without their weights."""
        device, precision = self._learner.device, self._settings.precision
        noise = torch.Generator(device=device)
        noise.manual_seed(self._settings.seed * 1_000_003 + step)
        self._optimizer.zero_grad(set_to_none=True)
        values: dict[str, tuple[float, float]] = {}
        parts = self._learner.losses(batch, noise, step)
        while True:
            with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                part = next(parts, None)
            if part is None:
                return values
            value = float(part.value.detach())
            if not math.isfinite(value):
                self._fail("loss", value)
            part.value.backward()  # type: ignore[no-untyped-call]
            values[part.name] = (value, part.plain)

    def _fail(self, what: str, value: float) -> None:
        step = self._place.step + 1
        kept = (
            f"{self._state_path} keeps step {self._saved_step}"
            if self._saved_step is not None
            else "no checkpoint was made before it"
        )
        raise SpecrunError(
            f"the {what} at step {step} is {value}, not a number to learn from: training stopped and {kept}; "
            "use a lower --learning-rate"
        )

    def _measure(self) -> None:
        self._learner.module.eval()
        batches: Sequence[TokenBatch] = [
            self._corpus.batch(numbers).to(self._learner.device)
            for numbers in self._corpus.held_out_batches(self._settings.tokens_per_batch)
        ]
        with torch.no_grad():
            found = self._learner.measure(batches)
        self._curves.measures.append((self._place.step, found))
        self._learner.module.train()
        logger.info("step %d: %s", self._place.step, ", ".join(f"{k} {v:.3f}" for k, v in found.items()))

    def _tell(self) -> None:
        if self._report is None:
            return
        place = self._place
        per_step = place.seconds / max(1, place.step)
        self._report(
            TrainingStatus(
                step=place.step,
                steps=self._settings.steps,
                loss=self._smooth or 0.0,
                measures=self._curves.measures[-1][1] if self._curves.measures else {},
                tokens_per_second=place.tokens / place.seconds if place.seconds > 0 else 0.0,
                seconds_left=per_step * (self._settings.steps - place.step),
            )
        )

    def _save(self) -> None:
        if self._state_path is None or self._saved_step == self._place.step or not self._whole or not self._place.step:
            return
        run = (self._identity, self._learner, self._optimizer, self._place, self._curves)
        save_run(self._state_path, *run, precision=self._settings.precision)
        self._saved_step = self._place.step


def _smoothed(before: float | None, loss: float) -> float:
    return loss if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * loss
