"""Acceptance beside SpecTr's optimal transport, solved as a linear programme.

For one draw the best coupling is the maximal one, 1 - TV, which the exact rule reaches. For k draws
k-SEQ is within 1 - (1 - 1/k)^k of the optimum (Sun et al. 2023, theorem 2), and nothing exceeds it;
testing the first draw alone is not within that bound, so it would be seen.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.enumeration import FixedTable, accepted_lengths, branching_tree
from support.optimal_transport import (
    acceptance_by_draw,
    acceptance_probability,
    best_acceptance,
    coverage_bound,
)

from specrun.runtime.acceptance import AcceptanceRule, ExactRule, KSeq, KSeqRule
from specrun.runtime.laws import Law

SOLVED = 1e-7  # what HiGHS is trusted to
SIZES = [(3, 2), (4, 2), (5, 2), (3, 3), (4, 3), (3, 4)]


def random_laws(size: int, k: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of laws, flat ones and peaked ones, some with tokens of no mass."""
    rng = np.random.default_rng([size, k])
    laws = []
    for _ in range(count):
        pair = [rng.dirichlet(np.full(size, rng.choice([0.2, 1.0, 5.0]))) for _ in range(2)]
        if rng.random() < 0.3:
            pair[rng.integers(2)][rng.integers(size)] = 0.0
        laws.append((pair[0] / pair[0].sum(), pair[1] / pair[1].sum()))
    return laws


def shipped_acceptance(
    rule: AcceptanceRule, target: np.ndarray, draft: np.ndarray, k: int
) -> float:
    """The exact probability that the shipped loop keeps one of k i.i.d. drafts."""
    propose = branching_tree(FixedTable(*draft), (k,), True)
    return accepted_lengths(rule, propose, FixedTable(*target), 2).get(1, 0.0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_best_coupling_of_one_draw_is_the_maximal_one(size: int) -> None:
    for target, draft in random_laws(size, 1, 12):
        best = best_acceptance(target, draft, 1)
        assert best == pytest.approx(1.0 - 0.5 * np.abs(target - draft).sum(), abs=SOLVED)
        assert best == pytest.approx(acceptance_probability(target, draft), abs=SOLVED)
        for rule in (ExactRule(), KSeqRule()):
            assert shipped_acceptance(rule, target, draft, 1) == pytest.approx(best, abs=SOLVED)


@pytest.mark.parametrize(("size", "k"), SIZES)
def test_kseq_is_within_its_bound_of_the_best_transport(size: int, k: int) -> None:
    share, below = 1.0 - (1.0 - 1.0 / k) ** k, 0
    for target, draft in random_laws(size, k, 15):
        best = best_acceptance(target, draft, k)
        found = KSeq(Law(target), Law(draft), k).acceptance
        recursive = sum(acceptance_by_draw(target, [draft] * k))
        assert share * best - SOLVED <= found <= best + SOLVED
        assert recursive <= found + 1e-12
        assert best <= coverage_bound(target, draft, k) + SOLVED
        below += found < best - 1e-3
    assert below > 3  # or the oracle would say nothing that the rule does not


@pytest.mark.parametrize(("size", "k"), [(3, 2), (3, 3)])
def test_the_shipped_rules_accept_what_the_formulas_say(size: int, k: int) -> None:
    for target, draft in random_laws(size, k, 3):
        best = best_acceptance(target, draft, k)
        shipped = shipped_acceptance(KSeqRule(), target, draft, k)
        assert shipped == pytest.approx(KSeq(Law(target), Law(draft), k).acceptance, abs=1e-12)
        assert shipped <= best + SOLVED
        exact = shipped_acceptance(ExactRule(), target, draft, k)
        assert exact == pytest.approx(sum(acceptance_by_draw(target, [draft] * k)), abs=1e-12)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_who_tests_the_first_draw_alone_misses_the_bound(k: int) -> None:
    """The control."""
    share = 1.0 - (1.0 - 1.0 / k) ** k
    missed = [
        acceptance_probability(target, draft) < share * best_acceptance(target, draft, k) - 1e-3
        for target, draft in random_laws(3, k, 15)
    ]
    assert any(missed)
