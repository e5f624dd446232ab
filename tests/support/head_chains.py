"""Greedy chains of a head token by token: the reference for chains in one graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.runtime.drafters.eagle import EagleSource
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.hydra import HydraSource
from specrun.runtime.heads import NamedChildren, RowPiece, RowPlaces, TreePlan
from specrun.runtime.trees import DynamicShape, Topology, TreeSampling


@functools.cache
def chain_plan(n: int, *, has_values: bool = False) -> TreePlan:
    """The plan of a chain: a tree of width 1."""
    return TreePlan((1,) * n, (1,) * n, ((0,),) * (n - 1), has_values=has_values)


def eagle_drafter(
    cells: Any,
    shape: Topology | DynamicShape,
    sampling: TreeSampling = "argmax",
    p_min: float = 0.0,
) -> GrowingDrafter:
    """A drafter over an EAGLE head."""
    return GrowingDrafter(EagleSource(cells), shape, sampling=sampling, p_min=p_min)


def hydra_drafter(cells: Any, shape: Topology | DynamicShape) -> GrowingDrafter:
    """A drafter over Hydra's heads."""
    return GrowingDrafter(HydraSource(cells), shape)


class PairsByDepth:
    """For heads over pairs: no tree in one graph, so that it is grown depth by depth."""

    depth_params, most_highest = 0.0, 0

    @property
    def head(self) -> PairsByDepth:
        return self

    def tree(self, *given: object) -> NamedChildren | None:
        return None


class PairChainByDepth(PairsByDepth):
    """For heads over pairs: `tree` of a chain made of `evaluate`."""

    def tree(  # type: ignore[override]
        self, plan: TreePlan, piece: RowPiece, _last: int
    ) -> NamedChildren | None:
        n = len(plan.ranks)
        if plan != chain_plan(n, has_values=plan.has_values):
            return None
        return pair_chain(self, piece.tokens, piece.rows, piece.position, piece.count, n)

    def drop(self, _n: int, _position: int) -> None:
        raise NotImplementedError  # of a window, which none of them has


def whole_places(places: RowPlaces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, cells, and all cells that each row sees."""
    positions, cells, seen, sees = places
    whole = np.hstack([np.ones((len(sees), seen), bool), sees])
    return np.array(positions), np.array(cells), whole


def pair_chain(
    head: Any, tokens: Sequence[int], features: np.ndarray, position: int, count: int, n: int
) -> NamedChildren:
    m = len(tokens)
    places = range(position, position + m), range(count, count + m), count, np.tri(m, dtype=bool)
    rows = head.evaluate(tokens, features, places, real=True)
    drafted, log_probs = [int(rows.tokens[-1, 0])], [rows.log_probs[-1, 0]]
    for depth in range(n - 1):
        cell = count + m + depth
        place = [position + m + depth], [cell], cell, np.ones((1, 1), bool)
        rows = head.evaluate([drafted[-1]], rows.states[-1:], place)
        drafted.append(int(rows.tokens[0, 0]))
        log_probs.append(rows.log_probs[0, 0])
    return NamedChildren(drafted, np.cumsum(log_probs, dtype=np.float32))
