"""Formulas of speculative decoding: expected tokens, speed-ups and acceptance, by their papers.

Notation of the formulas: P the target's law, Q the drafter's, a (alpha) the probability that a
drafted token is accepted, g (gamma) the drafted tokens of a round, c the cost of one drafter step
over one plain target step, T(n) the measured time of a target evaluation of n tokens. "Leviathan"
is Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
`chain_theory` puts together what they say about chains of a tuned pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.costs.curves import RoundCosts
from specrun.runtime.law import FloatArray

SecondsOf = Callable[[int], float]
"""A measured cost curve: the seconds of one evaluation of n tokens."""


# -- chains ----------------------------------------------------------------------------------------


def expected_tokens(acceptance: float, n_draft: int) -> float:
    """Return the expected tokens of a round, the target's own included: (1 - a^(g+1)) / (1 - a).

    Leviathan, equation 1: a geometric law capped at g + 1. Computed as 1 + a + ... + a^g, so that a
    = 1 gives g + 1.
    """
    _require_probability("acceptance", acceptance)
    _require_count("n_draft", n_draft)
    return math.fsum(acceptance**index for index in range(n_draft + 1))


def wall_clock_improvement(acceptance: float, n_draft: int, cost_ratio: float) -> float:
    """Return tokens per second over plain decoding's: (1 - a^(g+1)) / ((1 - a) (g c + 1)).

    Leviathan, theorem 3.8, where a target evaluation takes as long for g + 1 tokens as for one.
    """
    _require_cost("cost_ratio", cost_ratio)
    return expected_tokens(acceptance, n_draft) / (n_draft * cost_ratio + 1.0)


def operation_ratio(acceptance: float, n_draft: int, operation_cost_ratio: float) -> float:
    """Return operations per token over plain decoding's: (1 - a) (g c' + g + 1) / (1 - a^(g+1)).

    Leviathan, theorem 3.11; c' (c-hat) is the drafter's operations per token over the target's.
    """
    _require_cost("operation_cost_ratio", operation_cost_ratio)
    return (n_draft * operation_cost_ratio + n_draft + 1.0) / expected_tokens(acceptance, n_draft)


def best_draft_length(acceptance: float, cost_ratio: float, max_draft: int = 64) -> int:
    """Return the g of 0..max_draft with most `wall_clock_improvement`, the shortest of equals.

    Leviathan, section 3.5. Drafting pays exactly if a > c, and then gains at least (1 + a) / (1 +
    c) (corollary 3.9).
    """
    _require_count("max_draft", max_draft)
    return _best(lambda n_draft: wall_clock_improvement(acceptance, n_draft, cost_ratio), max_draft)


# -- measured costs --------------------------------------------------------------------------------


def predicted_tokens_per_second(
    tokens: float, n_drafted: int, target_seconds: SecondsOf, drafter_seconds: float
) -> float:
    """Return E / (T(n + 1) + d): E tokens a round, n drafted ones and the root, d to draft.

    Leviathan's theorem 3.8 with the machine's own T, whose growth with n that theorem leaves out;
    for trees it is Sequoia's objective (Chen et al. 2024, section 3.3: hardware-aware tree
    optimisation).
    """
    _require_count("n_drafted", n_drafted)
    _require_cost("drafter_seconds", drafter_seconds)
    return tokens / (_seconds(target_seconds, n_drafted + 1) + drafter_seconds)


def measured_improvement(
    tokens: float, n_drafted: int, target_seconds: SecondsOf, drafter_seconds: float
) -> float:
    """Return E T(1) / (T(n + 1) + d): `predicted_tokens_per_second` over plain decoding's."""
    plain = _seconds(target_seconds, 1)
    return plain * predicted_tokens_per_second(tokens, n_drafted, target_seconds, drafter_seconds)


def best_measured_draft_length(
    acceptance: float, target_seconds: SecondsOf, drafter_step_seconds: float, max_draft: int = 64
) -> int:
    """Return the g of 0..max_draft with most tokens a second, by the measured T(g + 1).

    T has steps where kernels change, so that the gain has several peaks: every length is tried.
    """
    _require_count("max_draft", max_draft)

    def speed(n_draft: int) -> float:
        tokens, drafting = expected_tokens(acceptance, n_draft), n_draft * drafter_step_seconds
        return predicted_tokens_per_second(tokens, n_draft, target_seconds, drafting)

    return _best(speed, max_draft)


# -- what acceptance is made of --------------------------------------------------------------------


def acceptance_probability(target_probs: FloatArray, draft_probs: FloatArray) -> float:
    """Return the probability that a draw from Q is accepted: sum min(P, Q) = 1 - TV(P, Q).

    Leviathan, theorem 3.5; its mean over positions is alpha (corollary 3.6). No rule accepts one
    draw more often.
    """
    return min(1.0, float(np.minimum(target_probs, draft_probs).sum()))  # rounding may exceed 1


# -- a tuned pair ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainTheory:
    """Leviathan et al. (2023) for one acceptance rate: `acceptance` is alpha, `cost_ratio` c.

    `flat_length` and `flat_improvement` are for a machine on which verifying more tokens costs
    nothing (theorem 3.8); `length` and `improvement` for this one, with the measured T(g + 1).
    `expected_tokens` (equation 1) and `operations` (theorem 3.11) are those of `length`.
    Improvements are over plain decoding; a length of 0 is plain decoding.
    """

    acceptance: float
    cost_ratio: float
    flat_length: int
    flat_improvement: float
    length: int
    improvement: float
    expected_tokens: float
    operations: float


def chain_theory(
    acceptance: float, costs: RoundCosts, operation_cost_ratio: float, *, max_length: int = 16
) -> ChainTheory:
    """Return what the formulas say; `operation_cost_ratio` is c-hat (`operation_ratio`)."""

    def target_seconds(n: int) -> float:
        # T(1) is plain decoding, which pays for no tree and no drafted node.
        return costs.plain_seconds if n == 1 else costs.verify_seconds(n - 1)

    # c counts Python's share on both sides: it is the ratio of what the machine really takes.
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
        operations=operation_ratio(acceptance, length, operation_cost_ratio),
    )


# -- what may be asked -----------------------------------------------------------------------------


def _best(gain: Callable[[int], float], highest: int) -> int:
    # -count: of equal gains the shortest.
    return max(range(highest + 1), key=lambda count: (gain(count), -count))


def _seconds(target_seconds: SecondsOf, n_tokens: int) -> float:
    seconds = target_seconds(n_tokens)
    if not (math.isfinite(seconds) and seconds > 0.0):
        problem = f"the cost curve gives {seconds} seconds for {n_tokens} tokens"
        raise OptionError(f"{problem}: it must be above 0")
    return seconds


def _require_probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"{name} is {value}: it must be between 0 and 1")


def _require_count(name: str, value: int) -> None:
    if value < 0:
        raise OptionError(f"{name} is {value}: it must be 0 or more")


def _require_cost(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise OptionError(f"{name} is {value}: it must be a number of 0 or more")
