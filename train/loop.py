"""The training loop: a fixed number of steps, resumable at any of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from specrun.train.batches import Batch
from specrun.train.checkpoint import load_state, save_state
from specrun.train.llama import Llama
from specrun.train.muon import Muon

logger = logging.getLogger(__name__)

EpochBatches = Callable[[int], list[Batch]]
"""All batches of an epoch, in order, from the epoch's number alone."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How long and how fast to learn; `decay` is the last share of the steps, in which rates fall to zero."""

    steps: int
    matrix_lr: float = 0.01
    other_lr: float = 0.005
    warmup_steps: int = 100
    decay: float = 0.5
    matrix_optimizer: str = "muon"
    precision: torch.dtype = torch.float32
    save_seconds: float = 180.0
    report_every: int = 50


@dataclass(frozen=True, slots=True)
class Progress:
    """`step` steps are done, the next batch is number `index` of `epoch`; what it took so far, padding included."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The losses of the steps made in this run, and all progress, earlier runs' included."""

    losses: list[float]
    progress: Progress


def rate_factor(step: int, settings: LoopSettings) -> float:
    """Warm-up, a plateau, then a straight line to zero: the plateau may be lengthened while training."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    left = (settings.steps - step) / max(1.0, settings.decay * settings.steps)
    return min(warm, 1.0, left)


def make_optimizers(model: Llama, settings: LoopSettings) -> list[torch.optim.Optimizer]:
    """Muon (or AdamW) for the hidden matrices, AdamW for embeddings and norms; nothing decays."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    betas = (0.9, 0.98)
    first: torch.optim.Optimizer
    if settings.matrix_optimizer == "muon":
        first = Muon(matrices, lr=settings.matrix_lr, dtype=settings.precision)
    else:
        first = torch.optim.AdamW(matrices, lr=settings.matrix_lr, betas=betas, weight_decay=0.0)
    rest = torch.optim.AdamW(others, lr=settings.other_lr, betas=betas, weight_decay=0.0)
    for optimizer in (first, rest):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [first, rest]


def train(
    model: Llama,
    epoch_batches: EpochBatches,
    settings: LoopSettings,
    state_path: Path | None = None,
    after_epoch: Callable[[int], None] | None = None,
) -> TrainReport:
    """Train `model` in place up to `settings.steps`.

    With a `state_path` the state is saved every `save_seconds` and at the end; an existing one is continued.
    """
    optimizers = make_optimizers(model, settings)
    progress = _restore(model, optimizers, state_path)
    losses: list[float] = []
    clock = saved_at = time.monotonic()
    for place, batch in _stream(epoch_batches, progress, settings.steps, after_epoch):
        losses.append(_step(model, optimizers, batch, rate_factor(place.step - 1, settings), settings.precision))
        now = time.monotonic()
        progress = replace(place, tokens=progress.tokens + batch.ids.numel(), seconds=progress.seconds + now - clock)
        clock = now
        if progress.step % settings.report_every == 0:
            recent = losses[-settings.report_every :]
            logger.info("step %d, epoch %d, loss %.4f", place.step, place.epoch, sum(recent) / len(recent))
        if state_path is not None and now - saved_at > settings.save_seconds:
            _save(state_path, model, optimizers, progress)
            saved_at = now
    if state_path is not None and losses:
        _save(state_path, model, optimizers, progress)
    return TrainReport(losses, progress)


def _stream(
    epoch_batches: EpochBatches, start: Progress, steps: int, after_epoch: Callable[[int], None] | None
) -> Iterator[tuple[Progress, Batch]]:
    """Batches from `start` on, each with the place after it, until `steps` steps are done."""
    step, epoch, index = start.step, start.epoch, start.index
    while step < steps:
        batches = epoch_batches(epoch)
        while index < len(batches) and step < steps:
            step, index = step + 1, index + 1
            yield Progress(step, epoch, index), batches[index - 1]
        if index >= len(batches):
            if after_epoch is not None:
                after_epoch(epoch)
            epoch, index = epoch + 1, 0


def _step(
    model: Llama, optimizers: list[torch.optim.Optimizer], batch: Batch, factor: float, precision: torch.dtype
) -> float:
    """One update; returns the loss before it."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        loss = model.loss(batch.ids.to(device), batch.labels.to(device))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _save(path: Path, model: Llama, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    save_state(path, state)


def _restore(model: Llama, optimizers: list[torch.optim.Optimizer], path: Path | None) -> Progress:
    """Continue from a saved state; learning rates are the caller's, not the state's."""
    if path is None or not path.exists():
        return Progress()
    state = load_state(path)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        base = [group["base_lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict(saved)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["base_lr"] = lr
    progress = Progress(**state["progress"])
    logger.info("continuing from step %d", progress.step)
    return progress
