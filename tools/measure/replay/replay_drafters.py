"""Drafters built for a replay: with the cost curve as their plan, and the replay's clock."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from measure.replay.replay import ReplayClock, ReplayResult, ReplayText, replay_all
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.planning import CostCurve
from specrun.runtime.planning.theory import multiplications


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay: `drafters` (expressions with their files) over `texts`, on a cost curve.

    `draft_cost` is what an evaluation of a draft model costs, in those of one token by the target;
    None: as much as its parameters are of the target's. With `keeps_state` the texts of one name
    are one session.
    """

    drafters: tuple[str, ...]
    texts: tuple[ReplayText, ...]
    curve: CostCurve
    context: ContextOptions
    draft_cost: float | None = None
    keeps_state: bool = False

    def __post_init__(self) -> None:
        if not self.drafters or not self.texts:
            raise OptionError("there is nothing to replay: give drafters and texts")
        if self.draft_cost is not None and not 0.0 <= self.draft_cost < float("inf"):
            share = "give a share of the target's evaluation, such as 0.1"
            raise OptionError(f"draft cost is {self.draft_cost}: {share}")


def replay_drafters(options: ReplayOptions, target: Model) -> Iterator[ReplayResult]:
    """Yield a result for each name of texts and each drafter."""
    for _, texts in itertools.groupby(options.texts, key=lambda text: text.name):
        group = list(texts)
        for expression in options.drafters:
            yield _replayed(expression, group, options, target)


def _replayed(
    expression: str, texts: Sequence[ReplayText], options: ReplayOptions, target: Model
) -> ReplayResult:
    clock = ReplayClock()
    environment = DraftEnvironment(
        target, options.context, n_gpu_layers=0, costs=options.curve, clock=clock
    )
    with (
        closing(build_drafter(expression, environment)) as weights,
        closing(weights.start()) as drafter,
    ):
        share = options.draft_cost
        if share is None:
            share = drafter.depth_params / multiplications(target)
        cost = share * options.curve.seconds(1)
        keeps = options.keeps_state
        result = replay_all(
            drafter, texts, options.curve, clock=clock, draft_seconds=cost, keeps_state=keeps
        )
        return dataclasses.replace(result, drafter=short_label(parse_expression(expression)))
