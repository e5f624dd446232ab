"""The formulas of costs/theory.py against brute force, and against the rules, enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import FixedTable, accepted_lengths, chain

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.planning import theory
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree

TARGET, DRAFT = (0.6, 0.3, 0.1), (0.2, 0.3, 0.5)  # alpha = 0.2 + 0.3 + 0.1
any_case = settings(max_examples=80, deadline=None, derandomize=True, database=None)
probability = st.floats(0.0, 1.0)
laws = (
    st.lists(st.integers(0, 6), min_size=4, max_size=4)
    .filter(any)
    .map(lambda weights: np.array(weights) / sum(weights))
)


def tokens_of_a_round(
    propose: Callable[[DraftRequest], DraftTree], depth: int, *target: float
) -> float:
    """The expected tokens of one round of the shipped loop under the exact rule, enumerated."""
    lengths = accepted_lengths(ExactRule(), propose, FixedTable(*target), depth + 1)
    return 1.0 + sum(count * share for count, share in lengths.items())


# -- chains ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_draft", [0, 1, 2, 4])
def test_expected_tokens_are_the_loops(n_draft: int) -> None:
    found = tokens_of_a_round(chain(FixedTable(*DRAFT), n_draft), n_draft, *TARGET)
    assert theory.expected_tokens(0.6, n_draft) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("n_draft", [0, 1, 3])
def test_wall_clock_and_operations_count_what_a_round_costs(n_draft: int) -> None:
    tokens = tokens_of_a_round(chain(FixedTable(*DRAFT), n_draft), n_draft, *TARGET)
    seconds = sum([1.0, *[0.05] * n_draft])  # one target evaluation, then the drafter's steps
    assert theory.wall_clock_improvement(0.6, n_draft, 0.05) == pytest.approx(
        tokens / seconds, abs=1e-12
    )
    operations = sum([0.1] * n_draft) + len(
        range(n_draft + 1)
    )  # the target computes the root and every drafted token
    assert theory.operation_ratio(0.6, n_draft, 0.1) == pytest.approx(
        operations / tokens, abs=1e-12
    )


def test_the_papers_numbers() -> None:
    """Leviathan et al. 2023, table 1: operations and speed for some acceptances and draft lengths,
    c = 0."""
    rows = {
        (0.6, 2): (1.53, 1.96),
        (0.7, 3): (1.58, 2.53),
        (0.8, 2): (1.23, 2.44),
        (0.8, 5): (1.63, 3.69),
    }
    rows |= {(0.9, 2): (1.11, 2.71), (0.9, 10): (1.60, 6.86)}
    for (acceptance, n_draft), (operations, speed) in rows.items():
        assert theory.operation_ratio(acceptance, n_draft, 0.0) == pytest.approx(
            operations, abs=0.006
        )
        assert theory.wall_clock_improvement(acceptance, n_draft, 0.0) == pytest.approx(
            speed, abs=0.006
        )


@any_case
@given(probability, st.floats(0.0, 2.0), st.integers(0, 30))
def test_the_best_length_is_the_best_of_all(
    acceptance: float, cost_ratio: float, max_draft: int
) -> None:
    best = theory.best_draft_length(acceptance, cost_ratio, max_draft)
    gains = [
        theory.wall_clock_improvement(acceptance, count, cost_ratio)
        for count in range(max_draft + 1)
    ]
    assert gains[best] == max(gains)
    assert best == gains.index(max(gains))


# -- measured costs --------------------------------------------------------------------------------


@any_case
@given(probability, st.floats(0.0, 2.0))
def test_a_flat_curve_is_the_papers_case(acceptance: float, cost_ratio: float) -> None:
    flat = theory.best_measured_draft_length(acceptance, lambda n: 1.0, cost_ratio, 20)
    tokens = theory.expected_tokens(acceptance, flat)
    gain = theory.measured_improvement(tokens, flat, lambda n: 1.0, flat * cost_ratio)
    best = theory.best_draft_length(acceptance, cost_ratio, 20)
    assert gain == pytest.approx(theory.wall_clock_improvement(acceptance, best, cost_ratio))


# -- acceptance ------------------------------------------------------------------------------------


@any_case
@given(laws, laws)
def test_acceptance_is_one_minus_the_total_variation(target: np.ndarray, draft: np.ndarray) -> None:
    events = itertools.product((False, True), repeat=4)
    widest = max(abs(target[list(event)].sum() - draft[list(event)].sum()) for event in events)
    assert theory.acceptance_probability(target, draft) == pytest.approx(1.0 - widest, abs=1e-12)


def test_acceptance_is_the_loops() -> None:
    by_draw = accepted_lengths(ExactRule(), chain(FixedTable(*DRAFT), 1), FixedTable(*TARGET), 2)[1]
    assert theory.acceptance_probability(np.array(TARGET), np.array(DRAFT)) == pytest.approx(
        by_draw, abs=1e-12
    )


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.2, 3), "acceptance is 1.2: it must be between 0 and 1"),
        (lambda: theory.expected_tokens(float("nan"), 3), "acceptance is nan"),
        (lambda: theory.expected_tokens(0.5, -1), "n_draft is -1"),
        (lambda: theory.wall_clock_improvement(0.5, 3, -0.1), "cost_ratio is -0.1"),
        (lambda: theory.operation_ratio(0.5, 3, float("inf")), "operation_cost_ratio is inf"),
        (lambda: theory.best_draft_length(0.5, 0.1, -1), "max_draft is -1"),
        (
            lambda: theory.best_measured_draft_length(0.5, lambda n: 0.0, 0.1),
            "0.0 seconds for 1 tokens",
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()
