"""Sequoia's programme and the hardware-aware choice, each against every tree of up to 8 nodes."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specrun.bindings.errors import OptionError
from specrun.runtime.laws.law import FloatArray
from specrun.runtime.planning import (
    CostCurve,
    RoundCosts,
    SequoiaProgramme,
    best_tree,
    typical_acceptance,
)
from specrun.runtime.planning.optimal_trees import expected_tokens
from specrun.runtime.trees import ROOT, Topology, parse_topology
from specrun.runtime.tuning import plan_tree, tokens_per_second, tree_plan

NODES = 8
probabilities = st.floats(0.0, 1.0, allow_subnormal=False)
acceptances = st.lists(probabilities, min_size=1, max_size=5)


@functools.cache
def forests(nodes: int) -> tuple[tuple[object, ...], ...]:
    """Every ordered forest of so many nodes, as nested tuples; there are as many as Catalan's
    number says."""
    if nodes == 0:
        return ((),)
    return tuple(
        (first, *rest)
        for n in range(nodes)
        for first in forests(n)
        for rest in forests(nodes - 1 - n)
    )


@functools.cache
def all_trees(nodes: int) -> tuple[Topology, ...]:
    """Every topology of exactly so many nodes."""
    return tuple(map(topology_of, forests(nodes)))


def topology_of(forest: tuple[object, ...]) -> Topology:
    parents: list[int] = []
    level = [(ROOT, forest)]
    while level:
        following = []
        for parent, children in level:
            for child in children:
                following.append((len(parents), child))
                parents.append(parent)
        level = following  # type: ignore[assignment]
    return Topology(tuple(parents))


def test_there_are_as_many_trees_as_catalans_numbers_say() -> None:
    assert [len(all_trees(n)) for n in range(NODES + 1)] == [1, 1, 2, 5, 14, 42, 132, 429, 1430]
    assert len({tree.parents for tree in all_trees(NODES)}) == 1430


def test_expected_tokens_of_known_trees() -> None:
    assert (
        expected_tokens(parse_topology("1x1x1"), [0.5]) == 1 + 0.5 + 0.25 + 0.125
    )  # Leviathan et al., equation 1
    assert expected_tokens(parse_topology("0 1 00 01 10"), [0.6, 0.2]) == pytest.approx(
        1 + 0.6 + 0.2 + 0.36 + 0.24
    )
    assert expected_tokens(parse_topology("3"), [0.6, 0.2]) == pytest.approx(
        1.8
    )  # the third is never accepted


# -- the dynamic programme -------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(acceptances, st.integers(0, 7), st.integers(0, 8))
def test_the_programme_equals_brute_force(acceptance: list[float], nodes: int, depth: int) -> None:
    """For any acceptance, falling with rank or not."""
    best = max(
        expected_tokens(tree, acceptance)
        for n in range(nodes + 1)
        for tree in all_trees(n)
        if tree.max_depth <= depth
    )
    programme = SequoiaProgramme(acceptance, nodes, depth)
    tree = programme.tree(nodes, depth)
    assert len(tree) <= nodes
    assert tree.max_depth <= depth
    assert expected_tokens(tree, acceptance) == pytest.approx(best, abs=1e-12)
    assert programme.value(nodes, depth) == pytest.approx(best, abs=1e-12)


def test_nodes_that_are_never_accepted_are_left_out() -> None:
    assert best_tree([0.5], 9, 3) == parse_topology("1x1x1")
    assert best_tree([0.0, 0.0], 9, 3) == Topology(())
    assert best_tree([], 9, 3) == Topology(())


def most_valuable(acceptance: Sequence[float], nodes: int, depth: int) -> float:
    """Return F of the most valuable nodes: where acceptance falls with rank they are a tree, and
    none has more."""
    total, open_nodes = 1.0, [(-acceptance[0], 1.0, 0, 1)]  # value, parent's value, rank, depth
    for _ in range(nodes):
        value, above, rank, level = heapq.heappop(open_nodes)
        total -= value
        if rank + 1 < len(acceptance):
            heapq.heappush(open_nodes, (-above * acceptance[rank + 1], above, rank + 1, level))
        if level < depth:
            heapq.heappush(open_nodes, (value * acceptance[0], -value, 0, level + 1))
    return total


@pytest.mark.parametrize(("nodes", "depth"), [(128, 16), (256, 32), (100, 3)])
def test_large_trees_are_of_the_most_valuable_nodes(nodes: int, depth: int) -> None:
    acceptance = typical_acceptance("without")
    tree = best_tree(acceptance, nodes, depth)
    assert len(tree) == nodes
    assert tree.max_depth <= depth
    assert expected_tokens(tree, acceptance) == pytest.approx(
        most_valuable(acceptance, nodes, depth), rel=1e-12
    )


def test_absurd_trees_are_refused() -> None:
    with pytest.raises(OptionError, match="0 to 256 nodes"):
        best_tree([0.5], 10**6, 3)
    with pytest.raises(OptionError, match="probabilities"):
        best_tree([float("nan")], 3, 3)


# -- the machine -----------------------------------------------------------------------------------

times = st.lists(st.floats(0.2, 5.0), min_size=NODES + 1, max_size=NODES + 1)


@settings(max_examples=60, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
@given(
    st.lists(st.floats(0.001, 1.0), min_size=NODES, max_size=NODES),
    times,
    times,
    times,
    st.floats(0.001, 1.0),
    st.floats(0.0, 0.2),
)
def test_the_plan_equals_brute_force(
    acceptance: list[float],
    target: list[float],
    draft: list[float],
    rebuilt: list[float],
    share: float,
    extra: float,
) -> None:
    """Any curves, rising or not; the plan is the fastest of all 2,055 trees, and none if plain is
    faster."""
    acceptance = sorted(acceptance, reverse=True)
    sizes = tuple(range(1, NODES + 2))
    costs = RoundCosts(
        CostCurve(sizes, tuple(target), tuple(target)),
        CostCurve(
            sizes,
            tuple(share * seconds for seconds in draft),
            tuple(share * seconds for seconds in rebuilt),
        ),
        per_round=extra,
        per_tree=extra / 2,
        per_law=extra / 3,
        per_node=extra / 7,
    )
    speeds = {
        tree: tokens_per_second(tree, acceptance, costs)
        for n in range(1, NODES + 1)
        for tree in all_trees(n)
    }
    best = max(speeds.values())
    plan = plan_tree(acceptance, costs, sizes=range(1, NODES + 1), max_depth=NODES)
    if plan is None:
        assert best <= 1.0 / costs.plain_seconds * (1 + 1e-12)
    else:
        assert plan.tokens_per_second == pytest.approx(best, rel=1e-12)
        assert plan.tokens_per_second == pytest.approx(speeds[plan.shape], rel=1e-12)
        assert plan.tokens_per_second > 1.0 / costs.plain_seconds
        assert plan.expected_tokens == pytest.approx(expected_tokens(plan.shape, acceptance))


def test_of_nodes_alike_the_first_children_are_evaluated() -> None:
    """The second child of 0 and the first of 1 are worth the same; the first of 1 is in the tree in
    any case, where 1 is evaluated."""
    acceptance = [0.78, 0.2, *[0.001] * 6]
    target = (4.3, 0.8, 3.9, 1.5, 3.1, 1.6, 1.5, 3.5, 0.2)
    drafts = (4.3249, 1.773, 4.3247, 2.708, 1.8, 1.133, 0.45, 1.379, 3.483)
    again = (1.9, 3.829, 3.106, 2.313, 3.314, 2.193, 4.041, 2.516, 2.627)
    sizes = tuple(range(1, NODES + 2))
    draft, rebuilt = (tuple(1e-3 * seconds for seconds in times) for times in (drafts, again))
    costs = RoundCosts(CostCurve(sizes, target, target), CostCurve(sizes, draft, rebuilt))
    trees = [tree for n in range(1, NODES + 1) for tree in all_trees(n)]
    plan = plan_tree(acceptance, costs, sizes=range(1, NODES + 1), max_depth=NODES)
    assert plan is not None
    best = max(tokens_per_second(tree, acceptance, costs) for tree in trees)
    assert plan.tokens_per_second == pytest.approx(best, rel=1e-12)


def curves(slope: float, draft: float = 0.01) -> RoundCosts:
    """A target whose n tokens cost 1 + slope (n - 1)."""
    target = CostCurve.flat([1 + slope * n for n in range(64)])
    return RoundCosts(target, CostCurve.flat([draft * (1 + 0.05 * n) for n in range(64)]))


@pytest.mark.parametrize(
    ("acceptance", "costs"),
    [
        ([0.9, 0.05], curves(1.0)),  # tokens cost the same together as one by one
        ([0.9, 0.05], curves(0.05, draft=3.0)),  # a drafter dearer than its target
        ([0.01], curves(0.1)),
        ([0.0, 0.5], curves(0.0)),
        ([], curves(0.0)),
    ],
)
def test_no_tree_is_planned_where_plain_decoding_is_faster(
    acceptance: list[float], costs: RoundCosts
) -> None:
    assert plan_tree(acceptance, costs) is None
    assert tokens_per_second(Topology(()), acceptance, costs) == pytest.approx(1.0)


def test_a_tolerance_takes_the_smaller_of_nearly_equal_trees() -> None:
    acceptance = typical_acceptance("argmax")
    best, near = (
        plan_tree(acceptance, curves(0.02)),
        plan_tree(acceptance, curves(0.02), tolerance=0.03),
    )
    assert best is not None
    assert near is not None
    assert len(near.shape) < len(best.shape)
    assert near.tokens_per_second >= 0.97 * best.tokens_per_second


def test_a_measured_acceptance_that_rises_with_rank_is_levelled() -> None:
    assert plan_tree([0.5, 0.1, 0.3], curves(0.01)) == plan_tree([0.5, 0.1, 0.1], curves(0.01))


# -- cost curves -----------------------------------------------------------------------------------


def test_costs_between_measured_sizes_lie_on_straight_lines() -> None:
    curve = CostCurve((1, 2, 4), (1.0, 1.5, 2.5), (2.0, 2.0, 4.0))
    assert [curve.seconds(n) for n in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.0, 2.5, 3.5]
    assert curve.seconds(3, rebuilt=True) == 3.0
    assert CostCurve((1,), (2.0,), (2.0,)).seconds(3) == 6.0
    assert (
        CostCurve((1, 2), (2.0, 1.0), (2.0, 1.0)).seconds(9) == 1.0
    )  # a falling end says nothing of what is free


def test_a_round_costs_what_its_parts_cost() -> None:
    draft = CostCurve((1, 2, 4), (0.1, 0.2, 0.4), (1.1, 1.2, 1.4))
    costs = RoundCosts(
        CostCurve.flat([1.0] * 32),
        draft,
        per_round=9.0,
        per_tree=1.0,
        per_law=100.0,
        per_node=1000.0,
    )
    # The root's evaluation, two nodes (a new shape), two again (the same), and one (new).
    tree = parse_topology("0 1 00 10 000 100 0000")
    assert tree.inner_widths == (1, 2, 2, 1)
    assert costs.round_seconds(len(tree), tree.inner_widths) == pytest.approx(
        1.0 + 10.0 + 7000.0 + (0.1 + 1.2 + 0.2 + 1.1) + 600.0
    )
    assert costs.plain_seconds == 10.0


@pytest.mark.parametrize(
    ("sizes", "times", "problem"),
    [
        ((), (), "at least one size"),
        ((2, 3), (1.0, 1.0), "start at 1 and ascend"),
        ((1, 1), (1.0, 1.0), "start at 1 and ascend"),
        ((1,), (0.0,), "are positive"),
        ((1, 2), (1.0,), "two times for each"),
    ],
)
def test_curves_that_make_no_sense_are_refused(
    sizes: tuple[int, ...], times: tuple[float, ...], problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        CostCurve(sizes, times, times)


def test_the_search_for_a_large_tree_is_bounded_and_beats_trees_that_ignore_widths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flat curve, as a GPU's, leaves the search most to try: 11 widths at each of 7 depths."""
    grow, grown = tree_plan._Beginning.grow, list[int]()

    def counted(beginning: tree_plan._Beginning, acceptance: FloatArray) -> None:
        grown.append(len(beginning.widths))
        grow(beginning, acceptance)

    monkeypatch.setattr(tree_plan._Beginning, "grow", counted)
    acceptance, sizes, depths = typical_acceptance("without"), range(1, 64), range(1, 9)
    flat = RoundCosts(
        CostCurve((1, 64), (1.0, 1.1), (1.0, 1.1)), CostCurve((1, 64), (0.01, 0.1), (0.01, 0.1))
    )
    plan = plan_tree(acceptance, flat)
    assert plan is not None
    assert len(grown) <= 1 + 7 * 100 * 11  # from the best 100 of each depth
    programme = SequoiaProgramme(acceptance, 63, 8)
    ignoring_widths = [programme.tree(n, depth) for n, depth in itertools.product(sizes, depths)]
    assert plan.tokens_per_second > max(
        tokens_per_second(tree, acceptance, flat) for tree in ignoring_widths
    )
    # No tree of a size and depth has more tokens than the programme's, nor takes less than chains
    # take.
    bounds = [
        programme.value(n, depth) / (flat.verify_seconds(n) + depth * flat.depth_seconds(1, 1))
        for n, depth in itertools.product(sizes, depths)
    ]
    assert plan.tokens_per_second <= max(bounds)
