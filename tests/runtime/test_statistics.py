"""Counting rounds: rates, lengths, acceptance by position, and None where nothing was counted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.rows import Rows
from specrun.runtime.engine import Engine, Runtime
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round.results import RoundCounter


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


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup"])
def test_rebuilt_are_the_rounds_of_another_width_than_the_one_before(
    tiny_model: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    decode = Context.decode

    def noted(context: Context, batch: Batch) -> Rows:
        widths.append(batch.n_tokens)
        return decode(context, batch)

    with Runtime(tiny_model, drafter, n_ctx=256) as runtime:
        monkeypatch.setattr(Context, "decode", noted)
        stats = runtime.generate([5, 6, 7] * 8, GREEDY, max_tokens=64).stats
    # The first width is the prompt's. Plain rounds pass by `decode` once compiled code takes over.
    assert stats.rebuilt == sum(a != b for a, b in pairwise(widths))
    if drafter == "none":
        assert stats.rebuilt == 1
    else:
        assert 3 < stats.rebuilt < stats.rounds == len(widths) - 1


def test_nobody_knows_what_was_rebuilt_where_conversations_share_evaluations(
    tiny_model: Path,
) -> None:
    with Engine(tiny_model, "none", slots=2, n_ctx=512) as engine:
        result = engine.submit([5, 6, 7], GREEDY, max_tokens=8).result
    assert result.stats.rebuilt is None
