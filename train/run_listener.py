"""Who is told how a run goes: the command line shows it, scripts may leave it."""

from __future__ import annotations

from typing import Protocol

from specrun.train.training_progress import TrainingStatus

__all__ = ["NobodyListens", "RunListener"]


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
