"""Listeners of a training run, its status and its result: the command line shows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Curves:
    """What a run has shown: losses of all steps, parts by name, and (step, measures)."""

    losses: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    measures: list[tuple[int, dict[str, float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """Where a run stands; `loss` is smoothed, `measures` are the latest, times are in seconds."""

    step: int
    steps: int
    loss: float
    measures: dict[str, float]
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A finished run: all curves, earlier parts too, and what it took in tokens and seconds."""

    curves: Curves
    tokens: int
    seconds: float
    resumed_at: int


class RunListener(Protocol):
    """Hears how a run goes."""

    def note(self, text: str) -> None:
        """Hear a fact in a sentence."""

    def stage(self, what: str, done: int, total: int) -> None:
        """Hear how far work before the training is."""

    def status(self, status: TrainingStatus) -> None:
        """Hear how far the training is."""


class NobodyListens:
    """Hears everything and shows nothing."""

    def note(self, text: str) -> None:
        """Hear a fact."""

    def stage(self, what: str, done: int, total: int) -> None:
        """Hear of work before the training."""

    def status(self, status: TrainingStatus) -> None:
        """Hear of the training."""
