"""Counting rounds: rates, lengths, acceptance by position, and None where nothing was counted."""

from __future__ import annotations

import pytest

from specrun.runtime.results import RoundCounter


def counted(*rounds: tuple[int, int, int]) -> RoundCounter:
    """Rounds as (depth of a drafted chain, accepted, produced)."""
    counter = RoundCounter()
    for depth, accepted, produced in rounds:
        counter.count(depth, depth, accepted, produced)
    return counter


def test_nothing_counted_is_none_never_nan():
    counter = counted()
    assert counter.acceptance_rate is None
    assert counter.mean_accepted_length is None
    assert counter.acceptance_by_position == ()


def test_plain_rounds_have_no_acceptance_rate():
    counter = counted((0, 0, 1), (0, 0, 1))
    assert counter.acceptance_rate is None
    assert counter.mean_accepted_length == 1.0


def test_sums():
    counter = counted((3, 3, 4), (3, 1, 2), (1, 0, 1))
    assert (counter.rounds, counter.tokens, counter.drafted, counter.accepted) == (3, 7, 7, 4)
    assert counter.acceptance_rate == pytest.approx(4 / 7)
    assert counter.mean_accepted_length == pytest.approx(7 / 3)


def test_acceptance_by_position_is_over_the_rounds_that_drafted_there():
    counter = counted((3, 3, 4), (3, 1, 2), (1, 0, 1), (0, 0, 1))
    assert counter.acceptance_by_position == pytest.approx((2 / 3, 1 / 2, 1 / 2))


def test_positions_are_depths_not_nodes_of_a_tree():
    counter = RoundCounter()
    counter.count(n_candidates=14, depth=3, n_accepted=2, n_tokens=3)
    assert counter.acceptance_by_position == (1.0, 1.0, 0.0)
    assert counter.acceptance_rate == 2 / 14


def test_acceptance_given_the_prefix_is_over_the_rounds_that_kept_all_above():
    counter = counted((3, 3, 4), (3, 1, 2), (3, 0, 1), (1, 1, 2), (0, 0, 1))
    # Depth 1 is tested in four rounds; depth 2 in the two that kept depth 1 and drafted on; depth 3
    # in one.
    assert counter.tested_by_position == (4, 2, 1)
    assert counter.acceptance_given_prefix == pytest.approx((3 / 4, 1 / 2, 1.0))


def test_depths_below_a_leaf_of_a_tree_are_not_tested():
    counter = RoundCounter()
    counter.count(
        n_candidates=5, depth=3, n_accepted=1, n_tokens=2, n_tested=1
    )  # kept a leaf; others went deeper
    counter.count(n_candidates=5, depth=3, n_accepted=1, n_tokens=2, n_tested=2)
    assert counter.tested_by_position == (2, 1)
    assert counter.acceptance_given_prefix == (1.0, 0.0)
    assert counted((0, 0, 1)).acceptance_given_prefix == ()
