"""Who is told how a run goes: the command line shows it, tests and scripts need not."""

from __future__ import annotations

from specrun.train.trainer import TrainingStatus

__all__ = ["RunListener"]


class RunListener:
    """Hears nothing of consequence; what shows a run overrides what it wants to hear."""

    def note(self, text: str) -> None:
        """Hear a fact in a sentence."""

    def stage(self, what: str, done: int, total: int) -> None:
        """Hear how far work before the training is."""

    def status(self, status: TrainingStatus) -> None:
        """Hear how far the training is."""
