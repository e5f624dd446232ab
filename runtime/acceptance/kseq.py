"""SpecTr's k-SEQ: k i.i.d. draws tested against one scaled-down ratio, near the best possible.

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport" (NeurIPS 2023), k-sequential
selection. For k draws from Q below a node with distribution P and a scale rho in [1, k]:

    b = sum_x min(Q(x), P(x) / rho)                     the probability that one draw passes
    accept each draw in turn with min(1, P(x) / (rho Q(x)))
    after the last rejection draw from norm(P - min(Q, P / rho) (1 - (1 - b)^k) / b)

The residual is not negative where (1 - (1 - b)^k) / b <= rho, and acceptance, 1 - (1 - b)^k, falls
with rho; so rho is the root of 1 - (1 - b)^k = rho b, where the left side falls and the right side
rises. That accepts at least (1 - (1 - 1/k)^k) times as often as the best transport of k draws
(their approximation theorem), and never less than the exact rule's recursive rejection, whose later
draws pass less often than its first: for the same acceptance A it tests fewer draws on average, so
A <= sum min(P, Q (1 - (1 - b)^k) / b) with A = 1 - (1 - b)^k, and A is largest where the two are
equal, at k-SEQ's root.

(1 - (1 - b)^k) / b is computed as the sum of (1 - b)^j over j < k, which needs no case for b = 0
(it is k: nothing can be accepted, rho is k and the residual P) nor for b = 1 (it is 1: P equals Q,
rho is 1). For k = 1 it is 1, so rho = 1: the token-wise rule.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.rule import (
    Acceptance,
    LawAt,
    count_to_test,
    settle_point_masses,
    walk,
)
from specrun.runtime.laws.law import FloatArray, Law
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.trees.tree import DraftTree, Draw

# Relative, and not far above float64's rounding (2e-16): a narrower interval has no use.
_PRECISION = 1e-14


class KSeq:
    """The rule's numbers for k draws from `draft` against `target`: the scale, and the residual."""

    def __init__(self, target: Law, draft: Law, k: int) -> None:
        self._target = target
        self._draft = draft
        self._k = k
        self.scale = 1.0 if k == 1 else _scale(target.probs, draft.aligned_to(target), k)
        """The paper's rho."""

    @functools.cached_property
    def passed(self) -> FloatArray:
        """The mass min(Q, P / rho) of each of the target's tokens that one draw passes with."""
        return np.minimum(self._draft.aligned_to(self._target), self._target.probs / self.scale)

    @property
    def acceptance(self) -> float:
        """The probability that one of the k draws is accepted, 1 - (1 - b)^k."""
        return min(1.0, float(self.passed.sum())) * self._tries

    @property
    def _tries(self) -> float:
        return _expected_tries(min(1.0, float(self.passed.sum())), self._k)

    def residual(self) -> Law:
        """Return the distribution after k rejections; the target's own if these are impossible."""
        left = self._target.probs - self.passed * self._tries
        np.maximum(left, 0.0, out=left)
        total = float(left.sum())
        return Law(left / total, self._target.ids) if total > 0.0 else self._target


class KSeqRule:
    """k-SEQ for every run of draws from one distribution; the exact formula (k = 1) for all others.

    Draws belong to a run if they follow each other with the same distribution. That means they are
    i.i.d. only if their number and their distributions were settled before the first of them was
    drawn: a drafter that draws again *because* of its draws ("until two differ") is within the
    exact rule's terms, but not within this one's.
    """

    name = "kseq"
    exact = True

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Walk down from the root, deciding one token per node (see the module's formula)."""
        return walk(tree, law_at, noise, position, _decide)


def _decide(
    tree: DraftTree, draws: Sequence[Draw], law: Law, noise: NoiseSource
) -> tuple[int | None, int]:
    """Return the accepted child (None after rejecting all) and the token that comes next."""
    remaining = law
    n_tested = count_to_test(draws)
    for run in _runs(draws[:n_tested]):
        draft = run[0].law or Law.point(tree.tokens[run[0].node])
        # rho is made of k before the first test: how many draws there are must not hang on them.
        plan = KSeq(remaining, draft, len(run))
        for draw in run:
            token = tree.tokens[draw.node]
            draft_prob = draft.probability(token)
            if draft_prob <= 0.0:
                problem = "was drafted from a distribution that lacks it"
                raise OptionError(f"token {token} {problem}")
            target_prob = remaining.probability(token)
            if target_prob > 0.0 and noise.accept(target_prob / (plan.scale * draft_prob)):
                return draw.node, token
        # The next run is tested against the rest of P, as in recursive rejection.
        remaining = plan.residual()
    return settle_point_masses(tree, draws[n_tested:], remaining, noise)


def _runs(draws: Sequence[Draw]) -> Iterator[list[Draw]]:
    """Yield the draws in order: neighbours of one distribution together, point masses alone."""
    run: list[Draw] = []
    for draw in draws:
        # Siblings without replacement have a distribution each: runs of one, with rho = 1 the exact
        # rule.
        if run and not _same_law(run[0].law, draw.law):
            yield run
            run = []
        run.append(draw)
    if run:
        yield run


def _same_law(first: Law | None, second: Law | None) -> bool:
    if first is None or second is None:
        return False
    if first is second:
        return True
    if (first.ids is None) != (second.ids is None) or not np.array_equal(first.probs, second.probs):
        return False
    return first.ids is None or second.ids is None or np.array_equal(first.ids, second.ids)


def _expected_tries(pass_probability: float, k: int) -> float:
    """Return how many of k draws are tested on average if each passes with this probability."""
    return float(sum((1.0 - pass_probability) ** index for index in range(k)))


def _scale(target_probs: FloatArray, draft_probs: FloatArray, k: int) -> float:
    """Return the root rho of 1 - (1 - b)^k = rho b, never below it by more than rounding."""
    pass_probability = _pass_probability(target_probs, draft_probs, k)
    low, high = 1.0, float(k)
    # Only b = 1 makes one try of k: P equals Q, and rho = 1 is the root.
    if _expected_tries(pass_probability(low), k) <= low:
        return low
    while high - low > _PRECISION * high:
        middle = 0.5 * (low + high)
        # Neighbouring floats have no middle: the loop would not end.
        if not low < middle < high:
            break
        if _expected_tries(pass_probability(middle), k) > middle:
            low = middle
        else:
            high = middle
    # Of the interval the end where the residual is not negative.
    return high


def _pass_probability(
    target_probs: FloatArray, draft_probs: FloatArray, k: int
) -> Callable[[float], float]:
    """Return b(rho) for rho in [1, k] as a function that costs a binary search.

    min(Q, P / rho) is P / rho where P / Q <= rho and Q elsewhere; only ratios between 1 and k
    change sides.
    """
    low = target_probs <= draft_probs
    high = ~low & (target_probs >= k * draft_probs)
    scaled, whole = float(target_probs[low].sum()), float(draft_probs[high].sum())
    # A token with Q = 0 is in `low` or `high`: the division below is by positive numbers only.
    middle = ~(low | high)
    targets, drafts = target_probs[middle], draft_probs[middle]
    ratios = targets / drafts
    order = ratios.argsort()
    sorted_ratios: list[float] = ratios[order].tolist()
    target_sums: list[float] = [0.0, *targets[order].cumsum().tolist()]
    draft_sums: list[float] = [0.0, *drafts[order].cumsum().tolist()]

    def value(rho: float) -> float:
        below = bisect_right(sorted_ratios, rho)
        mass = (scaled + target_sums[below]) / rho + whole + draft_sums[-1] - draft_sums[below]
        return min(1.0, mass)

    return value
