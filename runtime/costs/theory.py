"""Formulas of speculative decoding: expected tokens, speed-ups and acceptance, by their papers.

Notation of the formulas: P the target's law, Q the drafter's, a (alpha) the probability that a
drafted token is accepted, g (gamma) the drafted tokens of a round, c the cost of one drafter step
over one plain target step, T(n) the measured time of a target evaluation of n tokens. "Leviathan"
is Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
`chain_theory` puts together what they say about chains of a tuned pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.costs.curves import RoundCosts
from specrun.runtime.law import FloatArray

SecondsOf = Callable[[int], float]
"""A measured cost curve: the seconds of one evaluation of n tokens."""

_ROUNDING = 1e-9


# -- chains ----------------------------------------------------------------------------------------


def expected_tokens(acceptance: float, n_draft: int) -> float:
    """Return the expected tokens of a round, the target's own included: (1 - a^(g+1)) / (1 - a).

    Leviathan, equation 1: a geometric law capped at g + 1. Computed as 1 + a + ... + a^g, so that a
    = 1 gives g + 1.
    """
    _require_probability("acceptance", acceptance)
    _require_count("n_draft", n_draft)
    return math.fsum(acceptance**index for index in range(n_draft + 1))


def chain_expected_tokens(acceptances: Sequence[float]) -> float:
    """Return 1 + a_1 + a_1 a_2 + ...; a_i: acceptance of token i given all before it were accepted.

    Leviathan's equation 1 without the assumption that acceptance is the same at every position.
    """
    for acceptance in acceptances:
        _require_probability("acceptance", acceptance)
    return 1.0 + math.fsum(float(product) for product in np.cumprod(acceptances))


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


def total_variation(target_probs: FloatArray, draft_probs: FloatArray) -> float:
    """Return TV(P, Q) = sum |P - Q| / 2, Leviathan's D_LK (definition 3.3)."""
    return 0.5 * float(np.abs(target_probs - draft_probs).sum())


def acceptance_probability(target_probs: FloatArray, draft_probs: FloatArray) -> float:
    """Return the probability that a draw from Q is accepted: sum min(P, Q) = 1 - TV(P, Q).

    Leviathan, theorem 3.5; its mean over positions is alpha (corollary 3.6). No rule accepts one
    draw more often.
    """
    return min(1.0, float(np.minimum(target_probs, draft_probs).sum()))  # rounding may exceed 1


def point_mass_acceptance(target_probs: FloatArray, token: int) -> float:
    """Return P(x), a chosen token's acceptance: `acceptance_probability` with Q sure of x.

    With x the drafter's argmax this exceeds sum min(P, Q) where the target is surer of x than the
    drafter is, and falls short of it where both are flat and agree: which of the two drafts better
    is to be measured.
    """
    return float(target_probs[token])


def acceptance_by_draw(target_probs: FloatArray, draft_laws: Sequence[FloatArray]) -> list[float]:
    """Return the probability that the exact rule accepts draw 1, 2, ... of a node with these laws.

    SpecInfer (Miao et al. 2023, algorithm 2): with R_1 = P, draw i is reached if all before it were
    rejected and then accepted with a_i = sum min(R_i, Q_i); R_{i+1} = norm((R_i - Q_i)+). So it is
    a_i (1 - a_1) ... (1 - a_{i-1}). The laws must not depend on the draws (with replacement,
    several drafters, point masses as one-hot laws); without replacement they do, and this holds
    given the draws' laws.
    """
    remaining, reached = target_probs, 1.0
    accepted: list[float] = []
    for draft_probs in draft_laws:
        passed = acceptance_probability(remaining, draft_probs)
        accepted.append(reached * passed)
        reached *= 1.0 - passed
        left = np.maximum(remaining - draft_probs, 0.0)
        total = float(left.sum())
        # Nothing is left only where R = Q: the draw was then accepted, and `reached` is 0.
        remaining = left / total if total > 0.0 else remaining
    return accepted


def independent_draws_bound(acceptance: float, k: int) -> float:
    """Return 1 - (1 - a)^k, at least what recursive rejection or k-SEQ accepts of k i.i.d. draws.

    Both would reach it if every draw passed as the first one does alone. But a draw after a
    rejection faces a residual that lies where Q is small: min(R_i, Q) sums to Q(P > Q) at most,
    which is at most a. k-SEQ tests each draw with b(rho) <= b(1) = a (SpecTr, Sun et al. 2023).
    """
    _require_probability("acceptance", acceptance)
    _require_count("k", k)
    return 1.0 - (1.0 - acceptance) ** k


def coverage_bound(target_probs: FloatArray, draft_probs: FloatArray, k: int) -> float:
    """Return sum min(P, 1 - (1 - Q)^k), more than which no rule accepts of k i.i.d. draws.

    A token can only be accepted if it was drawn at all (the relaxation of SpecTr's transport
    problem, Sun et al. 2023, in which every token is bounded alone); k = 1 gives sum min(P, Q),
    which is reached.
    """
    _require_count("k", k)
    return float(np.minimum(target_probs, 1.0 - (1.0 - draft_probs) ** k).sum())


# -- trees -----------------------------------------------------------------------------------------


def tree_expected_tokens(parents: Sequence[int], acceptance_by_rank: Sequence[float]) -> float:
    """Return a drafted tree's expected tokens: 1 + the sum over nodes of their path's acceptances.

    Sequoia (Chen et al. 2024, section 3.1): under the positional acceptance assumption a node's
    child of rank r, the r-th drafted there, is accepted with `acceptance_by_rank[r]` given that the
    node was, whatever the node; so F(T) = sum_v prod_{u on the path to v} acceptance of u's rank,
    where the root counts 1. `parents` are `DraftTree.parents`: -1 for the root's children, earlier
    siblings first. A chain gives Leviathan's equation 1.
    """
    for share in acceptance_by_rank:
        _require_probability("acceptance_by_rank", share)
    if math.fsum(acceptance_by_rank) > 1.0 + _ROUNDING:
        rule = "at most one child of a node is accepted"
        raise OptionError(f"acceptance_by_rank sums to more than 1, but {rule}")
    n_children: dict[int, int] = {}
    reached: list[float] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            rule = "parents come before their children"
            raise OptionError(f"node {node} has parent {parent}: {rule}")
        rank = n_children.get(parent, 0)
        n_children[parent] = rank + 1
        accepted = acceptance_by_rank[rank] if rank < len(acceptance_by_rank) else 0.0
        reached.append((reached[parent] if parent >= 0 else 1.0) * accepted)
    return 1.0 + math.fsum(reached)


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
