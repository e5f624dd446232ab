"""The dynamic tree that yields the most tokens a second on this machine.

Sequoia's objective (Chen et al. 2024, section 3.3) for EAGLE-2's trees (Li et al. 2024): over depth d, `topk` k and n
kept nodes, maximise (1 + accepted(d, k, n)) / (T(n + 1) + t(1) + (d - 1) t(k)). The draft model evaluates k nodes at
each depth but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.runtime.drafters.path_probability import DynamicShape
from specrun.runtime.planning.cost_curves import RoundCosts
from specrun.runtime.planning.dynamic_acceptance import DynamicAcceptance
from specrun.runtime.planning.fastest_plan import fastest_plan

__all__ = ["DynamicPlan", "dynamic_round_seconds", "plan_dynamic_tree"]


@dataclass(frozen=True, slots=True)
class DynamicPlan:
    """A dynamic shape with what it should yield: tokens a round, and tokens a second."""

    shape: DynamicShape
    expected_tokens: float
    tokens_per_second: float


def dynamic_round_seconds(shape: DynamicShape, costs: RoundCosts) -> float:
    """Return what a round with a full tree of this shape takes."""
    drafting = costs.depth_seconds(1, None)
    before = 1
    for _ in range(shape.depth - 1):
        drafting += costs.depth_seconds(shape.topk, before)
        before = shape.topk
    return costs.verify_seconds(shape.nodes) + drafting


def plan_dynamic_tree(
    measured: Sequence[DynamicAcceptance], costs: RoundCosts, *, sizes: Sequence[int], tolerance: float = 0.0
) -> DynamicPlan | None:
    """Return the fastest shape, or None where plain decoding is at least as fast.

    `sizes` are the numbers of nodes it may keep. With a `tolerance` the smallest shape is taken that is at most this
    share slower than the best.
    """
    plans = [plan for one in measured for plan in _plans(one, costs, sizes)]
    return fastest_plan(plans, costs, tolerance=tolerance, size=lambda plan: (plan.shape.nodes, plan.shape.depth))


def _plans(measured: DynamicAcceptance, costs: RoundCosts, sizes: Sequence[int]) -> list[DynamicPlan]:
    plans: list[DynamicPlan] = []
    for depth in range(1, measured.max_depth + 1):
        most = measured.topk + (depth - 1) * measured.topk**2
        for nodes in sizes:
            if not depth <= nodes <= min(most, measured.max_nodes):
                continue
            shape = DynamicShape(depth, measured.topk, nodes)
            tokens = 1.0 + float(measured.accepted[depth, nodes])
            plans.append(DynamicPlan(shape, tokens, tokens / dynamic_round_seconds(shape, costs)))
    return plans
