"""The formulas of theory against the rules, enumerated, and their tables of chains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import FixedTable, accepted_lengths, chain

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.planning import (
    BestLengths,
    ChainInputs,
    CostCurve,
    MemoryTraffic,
    RoundCosts,
    best_lengths,
    chain_row,
    theory,
)
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree

TARGET, DRAFT = (0.6, 0.3, 0.1), (0.2, 0.3, 0.5)  # alpha = 0.2 + 0.3 + 0.1
any_case = settings(max_examples=80, deadline=None, derandomize=True, database=None)
probability = st.floats(0.0, 1.0)


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


# -- tables of chains ------------------------------------------------------------------------------

CURVE = CostCurve((1, 2, 4), (1.0, 1.5, 2.0), (1.0, 1.5, 2.0))
TRAFFIC = (MemoryTraffic(1000.0, 2.0), MemoryTraffic(100.0, 0.0))
INPUTS = ChainInputs(0.5, 0.1, 0.2, CURVE, TRAFFIC, 50.0)


def test_a_row_says_what_the_formulas_say() -> None:
    """Worked out by hand for alpha = 1/2, n = 2: 1 + 1/2 + 1/4 tokens a round."""
    row = chain_row(INPUTS, 2)
    assert row.tokens == pytest.approx(1.75)
    assert row.improvement == pytest.approx(1.75 / 1.2)
    assert row.operations == pytest.approx((2 * 0.2 + 3) / 1.75)
    assert row.measured == pytest.approx(1.75 / (1.75 + 0.2))  # T(3) lies between T(2) and T(4)
    assert row.bytes == pytest.approx((1100 + 200) / 1.75 / 1100)


def test_what_is_not_known_is_left_out() -> None:
    row = chain_row(ChainInputs(0.5, 0.1, 0.2), 2)
    assert row.measured is None
    assert row.bytes is None
    assert best_lengths(ChainInputs(0.5, 0.1, 0.2)) == BestLengths(2, None, None)


def test_the_best_lengths_are_those_of_most_gain() -> None:
    """A drafter for nothing is drafted with for ever, unless evaluations grow; one that costs more
    than it is accepted never."""
    free = dataclasses.replace(INPUTS, acceptance=0.9, cost_ratio=0.0)
    best = best_lengths(free, 20)
    assert best.flat == 20
    assert best.measured is not None
    assert best.measured < 20
    assert best_lengths(dataclasses.replace(INPUTS, cost_ratio=0.6)).flat == 0
    lengths = best_lengths(INPUTS)
    for name, value in (("improvement", lengths.flat), ("measured", lengths.measured)):
        assert value is not None
        gains = [getattr(chain_row(INPUTS, n), name) for n in range(30)]
        assert gains[value] == max(gains)


@any_case
@given(probability, st.floats(0.0, 2.0), st.integers(0, 30))
def test_the_best_length_is_the_first_of_the_best(
    acceptance: float, cost_ratio: float, most: int
) -> None:
    """On a machine on which width is free, by the measured curve, too."""
    inputs = ChainInputs(acceptance, cost_ratio, 0.0, CostCurve((1, 2), (1.0, 1.0), (1.0, 1.0)))
    best = best_lengths(inputs, most)
    gains = [theory.wall_clock_improvement(acceptance, n, cost_ratio) for n in range(most + 1)]
    assert best.flat == best.measured == gains.index(max(gains))
    measured = theory.chain_row(inputs, best.flat).measured
    assert measured == pytest.approx(gains[best.flat])


def test_width_that_costs_shortens_the_draft() -> None:
    rising = RoundCosts(
        CostCurve.flat([1.0 + 0.3 * n for n in range(20)]), CostCurve.flat([0.1] * 20)
    )
    found = theory.chain_theory(0.8, rising, 0.05)
    assert 0 < found.length < found.flat_length
    assert 1.0 < found.improvement < found.flat_improvement


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.2, 3), "acceptance is 1.2: it must be between 0 and 1"),
        (lambda: theory.expected_tokens(float("nan"), 3), "acceptance is nan"),
        (lambda: theory.expected_tokens(0.5, -1), "n_draft is -1"),
        (lambda: theory.wall_clock_improvement(0.5, 3, -0.1), "cost_ratio is -0.1"),
        (lambda: theory.operation_ratio(0.5, 3, float("inf")), "operation_cost_ratio is inf"),
        (lambda: ChainInputs(1.5, 0.1, 0.1), "acceptance is 1.5"),
        (lambda: ChainInputs(0.5, -0.1, 0.1), "cost_ratio is -0.1"),
        (lambda: ChainInputs(0.5, 0.1, float("nan")), "operation_cost_ratio is nan"),
    ],
)
def test_bad_input_is_named(call: Callable[[], float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()
