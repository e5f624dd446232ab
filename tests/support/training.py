"""Runs of tests: of heads for the taught target, of a recipe and a run as one, and stopped ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from specrun.train.heads import HeadRun
from specrun.train.trainer import TrainingRun, TrainingStatus, train
from specrun.train.trainer.learner import RunListener, SilentListener

__all__ = ["SMALL_RUN", "Order", "StopsAt", "head_run", "order_of", "stopped"]

SMALL_RUN: dict[str, Any] = {
    **{"tokens_per_batch": 256, "max_length": 64, "held_out": 0.0, "measures": 1},
    **{"device": "cpu", "precision": "float32", "n_threads": 1},
}
"""Settings of runs that take a second."""


def head_run(taught: Any, output: Path, **changes: Any) -> HeadRun:
    """A run of heads on what the taught target knows."""
    places = {"target": taught.folder, "data": (taught.data,), "output": output}
    return HeadRun(**{**places, **SMALL_RUN, "steps": 40, **changes})


class StopsAt(SilentListener):
    """Presses Ctrl-C after a step; keeps what was noted."""

    def __init__(self, step: int) -> None:
        self.step, self.notes = step, list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def status(self, status: TrainingStatus) -> None:
        if status.step == self.step:
            raise KeyboardInterrupt


def stopped(recipe: Any, run: TrainingRun, step: int = 2) -> Any:
    """Train until Ctrl-C after a step; return the run that goes on from there."""
    with pytest.raises(KeyboardInterrupt):
        train(recipe, run, StopsAt(step))
    return dataclasses.replace(run, resume=True)


@dataclasses.dataclass(frozen=True)
class Order:
    """What `train` is given."""

    recipe: Any
    run: TrainingRun

    def but(self, **changes: Any) -> Order:
        """The same with other values of the recipe's fields or the run's."""
        own = {field.name for field in dataclasses.fields(self.recipe)}
        recipe = {name: value for name, value in changes.items() if name in own}
        run = {name: value for name, value in changes.items() if name not in own}
        return Order(
            dataclasses.replace(self.recipe, **recipe), dataclasses.replace(self.run, **run)
        )

    def train(self, listener: RunListener | None = None) -> Any:
        """Train, and return the report."""
        return train(self.recipe, self.run, listener)


def order_of(kind: type, **values: Any) -> Order:
    """A recipe of a `kind` and a run, of the values of their fields."""
    own = {field.name for field in dataclasses.fields(kind)}
    recipe = {name: value for name, value in values.items() if name in own}
    run = {name: value for name, value in values.items() if name not in own}
    return Order(kind(**recipe), TrainingRun(**run))
