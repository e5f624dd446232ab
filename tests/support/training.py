"""A recipe and a run that belong together, changed and trained as one."""

from __future__ import annotations

import dataclasses
from typing import Any

from specrun.train.trainer import TrainingRun, train
from specrun.train.trainer.learner import RunListener

__all__ = ["Order", "order_of"]


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
