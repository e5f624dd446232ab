"""Which of several plans to take: the fastest, or a smaller one that is hardly slower."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from specrun.runtime.planning.cost_curves import RoundCosts

__all__ = ["fastest_plan"]


class _Plan(Protocol):
    @property
    def tokens_per_second(self) -> float: ...


Plan = TypeVar("Plan", bound=_Plan)


def fastest_plan(
    plans: Iterable[Plan], costs: RoundCosts, *, tolerance: float, size: Callable[[Plan], tuple[int, ...]]
) -> Plan | None:
    """Return the smallest plan that is at most the share `tolerance` slower than the fastest, of equals the faster.

    None where plain decoding is at least as fast as any. Fewer nodes are fewer guesses about the machine.
    """
    worth = [plan for plan in plans if plan.tokens_per_second > 1.0 / costs.plain_seconds]
    if not worth:
        return None
    fastest = max(plan.tokens_per_second for plan in worth)
    good = [plan for plan in worth if plan.tokens_per_second >= (1.0 - tolerance) * fastest]
    return min(good, key=lambda plan: (size(plan), -plan.tokens_per_second))
