"""What the formulas of the literature say about chains for a tuned setting, beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.runtime.planning.cost_curves import RoundCosts
from specrun.runtime.planning.theory import (
    best_draft_length,
    best_measured_draft_length,
    expected_tokens,
    measured_improvement,
    operation_ratio,
    wall_clock_improvement,
)

__all__ = ["ChainTheory", "chain_theory"]


@dataclass(frozen=True, slots=True)
class ChainTheory:
    """Leviathan et al. (2023) for one acceptance rate: `acceptance` is alpha, `cost_ratio` c.

    `flat_length` and `flat_improvement` are for a machine on which verifying more tokens costs nothing (theorem
    3.8); `length` and `improvement` for this one, with the measured T(g + 1). `expected_tokens` (equation 1) and
    `operations` (theorem 3.11) are those of `length`. Improvements are over plain decoding; a length of 0 is plain
    decoding.
    """

    acceptance: float
    cost_ratio: float
    flat_length: int
    flat_improvement: float
    length: int
    improvement: float
    expected_tokens: float
    operations: float


def chain_theory(acceptance: float, costs: RoundCosts, parameter_ratio: float, *, max_length: int = 16) -> ChainTheory:
    """Return what the formulas say; `parameter_ratio` is the draft model's parameters over the target's."""

    def target_seconds(n: int) -> float:
        return costs.plain_seconds if n == 1 else costs.verify_seconds(n - 1)

    step = costs.depth_seconds(1, None)
    ratio = step / costs.plain_seconds
    flat = best_draft_length(acceptance, ratio, max_length)
    length = best_measured_draft_length(acceptance, target_seconds, step, max_length)
    tokens = expected_tokens(acceptance, length)
    return ChainTheory(
        acceptance=acceptance,
        cost_ratio=ratio,
        flat_length=flat,
        flat_improvement=wall_clock_improvement(acceptance, flat, ratio),
        length=length,
        improvement=measured_improvement(tokens, length, target_seconds, length * step),
        expected_tokens=tokens,
        operations=operation_ratio(acceptance, length, parameter_ratio),
    )
