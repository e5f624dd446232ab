"""Leviathan's alpha of drafters that have a law: the mean over positions of sum min(p, q).

Leviathan et al. (2023), theorem 3.5 and corollary 3.6: a draw from q is accepted with probability
beta = sum_v min(p(v), q(v)), and alpha is the mean of beta. It is a property of the two laws alone,
whatever a drafter makes of its own: favourites that are taken as point masses are accepted with
p(x), which is reported by rank (`rank_acceptance`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specrun.runtime.costs import CostCurve, DrafterAlpha, RoundCosts, chain_theory
from specrun.runtime.costs.memory_traffic import MemoryTraffic, bytes_ratio
from specrun.runtime.drafters.ngram import NgramLaw, transformed, without_penalties
from specrun.runtime.drafters.ngram.text_counts import GrowingCounts
from specrun.runtime.law import Law
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.trees import RANKED_TOKENS, ranking_params
from specrun.runtime.tuning.rank_acceptance import CalibrationText, LawPair

NGRAM_ORDERS = (2, 3)
"""The n-gram laws that stand beside a draft model's: they cost next to nothing."""


def shared_mass(target: Law, draft: Law) -> float:
    """Return sum min(p, q), the chance that a draw from `draft` is accepted."""
    return min(1.0, float(draft.aligned_to(target).clip(max=target.probs).sum()))


def mean_alpha(pairs: Iterable[tuple[Law, Law]]) -> float:
    """Return alpha: the mean of sum min(p, q) over positions; 0 without any."""
    found = [shared_mass(target, draft) for target, draft in pairs]
    return sum(found) / len(found) if found else 0.0


def ngram_alpha(
    texts: Sequence[CalibrationText], targets: Sequence[Law], order: int, params: SamplingParams
) -> tuple[float, float]:
    """Return an n-gram law's alpha along texts, and the seconds of making one of its laws.

    `targets` are the target's laws for every token of the answers, text by text. Counts are those
    of the prompt and the answer so far. Where nothing was counted yet, nothing is accepted.
    """
    plain = without_penalties(params)
    if plain.is_greedy:
        plain = ranking_params(plain, RANKED_TOKENS)
    total, spent, place = 0.0, 0.0, 0
    for text in texts:
        counts = GrowingCounts(order)
        counts.begin(text.tokens[: text.n_prompt])
        law = NgramLaw([counts])
        for end in range(text.n_prompt, len(text.tokens)):
            before = time.perf_counter()
            found = law.after(text.tokens[max(0, end + 1 - order) : end] if order > 1 else ())
            found = None if found is None else transformed(found, plain)
            spent += time.perf_counter() - before
            if found is not None:
                if params.is_greedy:
                    found = Law.point(found.most_likely[0])
                total += shared_mass(targets[place], found)
            counts.extend([text.tokens[end]])
            place += 1
    return total / max(1, place), spent / max(1, place)


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What decides what a chain of a drafter is worth, for one sampling setting."""

    costs: RoundCosts
    target: MemoryTraffic
    n_context: float

    def row(
        self, drafter: str, alpha: float, costs: RoundCosts, operations: float, draft: MemoryTraffic
    ) -> DrafterAlpha:
        """Return what follows from a drafter's alpha, costs, operations and reads."""
        theory = chain_theory(alpha, costs, operations)
        read = bytes_ratio(self.target, draft, alpha, theory.length, n_context=self.n_context)
        return DrafterAlpha(drafter, operations, read, theory)


def alpha_rows(
    name: str,
    texts: Sequence[CalibrationText],
    pairs: Sequence[LawPair],
    costs: RoundCosts,
    params: SamplingParams,
    *,
    operation_ratio: float,
    traffic: tuple[MemoryTraffic, MemoryTraffic],
) -> tuple[DrafterAlpha, ...]:
    """Return alpha, and what follows from it, of the draft model `name` and of n-gram laws.

    `traffic` is what evaluations of target and draft model read.
    """
    n_context = sum(len(text.tokens) for text in texts) / max(1, len(texts))
    measured = PairCosts(costs, traffic[0], n_context)
    alpha = mean_alpha((pair.target, pair.draft) for pair in pairs)
    rows = [measured.row(name, alpha, costs, operation_ratio, traffic[1])]
    targets = [pair.target for pair in pairs]
    nothing = MemoryTraffic(0.0, 0.0)
    for order in NGRAM_ORDERS:
        alpha, seconds = ngram_alpha(texts, targets, order, params)
        own = replace(costs, draft=CostCurve.flat((max(seconds, 1e-9),)), per_law=0.0)
        rows.append(measured.row(f"ngram(order={order})", alpha, own, 0.0, nothing))
    return tuple(rows)
