"""Counting rounds: rates, lengths, acceptance by position, and None where nothing was counted."""

from __future__ import annotations

import pytest

from specrun.runtime.statistics import RoundCounter


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
